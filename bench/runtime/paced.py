"""Under a loose limit: a step as late as it allows, and prompts on the whole device until then."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from smkern.bench.runtime.cases import PACED, Cell
from smkern.bench.runtime.pump import LEAST, Feed, prompt_groups
from smkern.bench.runtime.rig import Rig, figures_of
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver, Ticket

MARGIN = 0.965
"""Of a limit: what the time between two steps' ends is aimed at."""
REMEMBERED = 8


@dataclass(slots=True)
class Pace:
    """When the next decode step is due.

    Attributes:
        period_us: From a step's end to the next one's.
        taken_us: From asking for a step until its end: prompts leave its SMs first.
        due_us: When the next is asked for.
        asked_us: When the running one was.
    """

    period_us: float
    taken_us: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    due_us: float = 0.0
    asked_us: float | None = None

    def over(self, ended_us: float) -> None:
        """The running step has ended."""
        assert self.asked_us is not None
        self.taken_us.append(ended_us - self.asked_us)
        self.asked_us = None
        self.due_us = ended_us + self.period_us - statistics.median(self.taken_us)


def paced(rig: Rig, rung: int, limit_ms: float) -> Iterator[Cell]:
    """Decode steps on a rung, one each limit; between them prompts take the whole device."""
    rig.prepare(None, rung)
    lanes = rig.lanes(rung)
    prompt = Feed("prefill", 2, prompt_groups(rig.side, rig.plan.group, rig.prefill_marks))
    _serve(rig, lanes, prompt, Pace(1e3 * limit_ms * MARGIN), rung)
    figures = figures_of(rig.read(rig.plan.group))
    about = {"rung": rung, "limit_ms": limit_ms}
    rate = figures["tokens_per_ms"]
    yield rig.plan.cell(PACED, rig.side.provider, rate, "tokens/ms", **about) | figures


def _serve(rig: Rig, lanes: Interleaver, prompt: Feed, pace: Pace, rung: int) -> None:
    step, running = Work("decode", rig.side.decode), False
    end, steps = time.monotonic() + 1.5 * rig.seconds, 0
    while time.monotonic() < end or min(prompt.launched, steps) < LEAST:
        for ticket in lanes.poll():
            if ticket.lane == "decode":
                pace.over(_end_us(ticket))
                running = False
                lanes.aim(rung, prefill=None)
        if pace.asked_us is None and lanes.device.now_us() >= pace.due_us:
            pace.asked_us = lanes.device.now_us()
            lanes.aim(rung)
        if pace.asked_us is not None and not running and lanes.can_launch("decode", step):
            lanes.launch("decode", step)
            running, steps = True, steps + 1
        prompt.top_up(lanes)
        lanes.wait(pace.due_us if pace.asked_us is None else None)
    lanes.drain()


def _end_us(ticket: Ticket) -> float:
    times = ticket.event.times_us()
    assert ticket.seen_us is not None
    return ticket.seen_us if times is None else times[1]
