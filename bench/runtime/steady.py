"""The steady state: decode beside prefill on each rung, paced decode, each side alone."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from smkern.bench.model.floor import Forward, beside_floor_us
from smkern.bench.runtime.cases import ALONE, PACED, STEADY, Cell, gap_name
from smkern.bench.runtime.figures import percentile, tbt
from smkern.bench.runtime.steady_bench import LEAST, Feed, SteadyBench, pump
from smkern.latency.cost import kernels_of
from smkern.profile import load_profile
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.ticket import Ticket

MARGIN = 0.965
"""Share of a limit that the time between two steps' ends is aimed at."""
REMEMBERED = 8


def multiplexed(bench: SteadyBench, rung: int) -> Iterator[Cell]:
    """A decode step beside prompts on a rung: its times, and the prompts' tokens per ms."""
    bench.prepare(rung)
    alone = tbt(bench.steps_alone(rung).periods_us)["tbt_p50_ms"]
    figures = bench.together(rung).figures()
    cell = bench.cell(STEADY, figures["tokens_per_ms"], "tokens/ms", rung=rung)
    share = beside_floor_ms(bench, rung, figures["sm_mhz"]) / figures["tbt_p50_ms"]
    yield cell | figures | {"alone_ms": alone, "fraction_of_beside_floor": round(share, 4)}


def beside_floor_ms(bench: SteadyBench, rung: int, sm_mhz: float | None) -> float:
    """The least time of a decode step on a rung beside prompts, at the clock that it had."""
    plan, profile = bench.plan, load_profile()
    load = Forward(plan.batch, 1, plan.context).load
    kernels = kernels_of(bench.steps.config, load, l2_bytes=profile.info.l2_bytes)
    return beside_floor_us(kernels, profile, rung, sm_mhz) / 1e3


def alone(bench: SteadyBench) -> Iterator[Cell]:
    """Prompts on the whole device with no decode at all, and decode steps with no prompt."""
    bench.prepare(None)
    steps = tbt(bench.steps_alone(None).periods_us)
    rate = round(bench.prompts_alone(None), 3)
    yield bench.cell(ALONE, rate, "tokens/ms") | {"decode_ms": steps["tbt_p50_ms"]}


def gaps(bench: SteadyBench, rung: int) -> Iterator[Cell]:
    """The share of a step in which the decode stream has no kernel, one and two steps ahead."""
    bench.prepare(rung)
    for ahead in (1, 2):
        found = bench.together(rung, ahead=ahead)
        shares = found.steps.gap_shares
        yield bench.cell(gap_name(ahead), round(statistics.median(shares), 5), "fraction") | {
            "p99": round(percentile(shares, 0.99), 5),
            "mean": round(statistics.fmean(shares), 5),
            "rung": rung,
            **found.figures(),
        }


@dataclass(slots=True)
class Pace:
    """When the next decode step is due.

    Attributes:
        period_us: From a step's end to the next one's.
        taken_us: From asking for a step until its end: prompts leave its SMs first.
        due_us: When the next is asked for.
        asked_us: When the running step was asked for.
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


def paced(bench: SteadyBench, rung: int, limit_ms: float) -> Iterator[Cell]:
    """Decode steps on a rung, one each limit; between them prompts take the whole device."""
    bench.prepare(None, rung)
    lanes = bench.lanes(rung)
    decode = Feed("decode", 1, bench.decode_steps())
    prompt = Feed("prefill", 2, bench.prompt_groups())
    end = time.monotonic() + 1.5 * bench.seconds

    def go_on() -> bool:
        return time.monotonic() < end or min(prompt.launched, decode.launched) < LEAST

    steer = _Paced(lanes, Pace(1e3 * limit_ms * MARGIN), decode, rung)
    pump(lanes, [prompt], go_on, steer=steer)
    figures = bench.read().figures()
    about = {"rung": rung, "limit_ms": limit_ms}
    yield bench.cell(PACED, figures["tokens_per_ms"], "tokens/ms", **about) | figures


@dataclass(slots=True)
class _Paced:
    """Launches a decode step when it is due, and gives its SMs back when it is over."""

    lanes: Interleaver
    pace: Pace
    decode: Feed
    rung: int

    def __call__(self, over: list[Ticket]) -> float | None:
        lanes, pace = self.lanes, self.pace
        for ticket in over:
            if ticket.lane == "decode":
                pace.over(_end_us(ticket))
                lanes.aim(self.rung, prefill=None)
        now_us = lanes.device.now_us()
        if pace.asked_us is None and now_us >= pace.due_us:
            pace.asked_us = now_us
            lanes.aim(self.rung)
        if pace.asked_us is not None:
            self.decode.top_up(lanes)
        return pace.due_us if pace.asked_us is None else None


def _end_us(ticket: Ticket) -> float:
    times = ticket.event.times_us()
    assert ticket.seen_us is not None
    return ticket.seen_us if times is None else times[1]
