"""A load that stays as it is, served under any policy and watched: rows that decode beside prompts.

Rows that decode grow, so a rate would depend on how long and after what a policy is watched. Here a
watch is made of windows: in each, all rows go from the same length to the same length, whatever the
policy; then all are replaced by requests that begin anew, whose prompts the pool still has.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from smkern.bench.ops.sampling import TEMPERATURE, TOP_K, TOP_P
from smkern.bench.power import Reading
from smkern.bench.runtime.figures import percentile
from smkern.bench.runtime.workload import PAGE_SIZE
from smkern.errors import SmkernError
from smkern.garbage import seldom_collected
from smkern.kernels.ledger import counters
from smkern.measure.sm_clock import Clock, NoClock, ticking
from smkern.models import SamplingParams
from smkern.policies import Policy
from smkern.runtime.executor import Executor
from smkern.runtime.handle import Handle
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.timeline.timeline import Timeline
from smkern.runtime.timeline.trace import Span

PROMPTS = 16
"""Different prompts, each of which comes again with another beginning: none is found in a cache."""
CAPACITY = 60_000
"""Launches that are kept: two minutes of layers launched one by one."""
PATIENCE_S = 60.0
KEYS = 64
"""Step times are told by the mean keys of a row, in steps of so many."""

Window = tuple[float, float]
"""Begin and end, on the device's clock, us."""


class WatchError(SmkernError):
    """A load that was not served as it was to be."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that decode all the time, and prompts that come one behind another beside them.

    All times are of the executor's device, so a simulated one serves it too.

    Args:
        running: How many decode.
        context: Mean of their keys over a window.
        prompt: Tokens of the prompts that come; each draws one token.
        waiting: How many of these are kept in the queue; 0: none comes.
        reach: Keys by which a window begins below the mean, and ends above it.
        lead: Tokens that a row may draw before all rows decode.
    """

    running: int
    context: int
    prompt: int
    waiting: int = 2
    reach: int = 128
    lead: int = 64

    @property
    def first(self) -> int:
        """Tokens of the rows' own prompts: one more than pages that are found again."""
        return max(0, self.context - self.reach - self.lead) // PAGE_SIZE * PAGE_SIZE + 1

    @property
    def bounds(self) -> tuple[int, int]:
        """Tokens that all rows have drawn, together, when a window begins and ends."""
        begin = self.context - self.reach - self.first
        return begin * self.running, (begin + 2 * self.reach) * self.running

    def params(self, max_context: int) -> SamplingParams:
        """How rows draw, which end only by being cancelled."""
        return SamplingParams(
            max_new_tokens=max_context - self.first - 1,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            top_p=TOP_P,
            seed=1,
            ignore_eos=True,
        )

    def watch(
        self,
        executor: Executor,
        policy: Policy,
        seconds: float,
        *,
        preheat_s: float = 0.0,
        clock: Clock | None = None,
        watts: Any = None,
    ) -> Watched:
        """Serve until the windows that count are as long as asked for; then all is cancelled.

        Args:
            executor: Idle, with a pool that finds prefixes again; it is idle again afterwards.
            policy: Decides.
            seconds: Duration of the windows together.
            preheat_s: Windows that begin earlier under load do not count.
            clock: Read while a window lasts.
            watts: A power meter, read at the end of each window.

        Raises:
            WatchError: rows that did not all decode, or grow, for a minute.
        """
        serving = _Serving(self, executor, policy, clock or NoClock(), watts)
        with seldom_collected():
            return serving.run(seconds, preheat_s)


@dataclass(slots=True)
class Watched:
    """What requests met in the windows, and what ran on the device.

    Attributes:
        windows: When they were.
        tbt_us: Gaps between two tokens of a row, as handed out, by the host's clock.
        control_us: Host time of each step that launched decode.
        steps: Spans of the decode lane, by the window that they lie in.
        prompt_tokens: Tokens of prompts computed in the windows, by the share of layers done.
        sm_mhz: Clock of the SMs, by their own count.
        watts: Power of the board.
        compiled: Kernels that were compiled or loaded since the load began.
    """

    windows: list[Window] = field(default_factory=list)
    tbt_us: list[float] = field(default_factory=list)
    control_us: list[float] = field(default_factory=list)
    steps: list[list[Span]] = field(default_factory=list)
    prompt_tokens: float = 0.0
    sm_mhz: float | None = None
    watts: float | None = None
    compiled: int = 0

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self.windows) / 1e6

    @property
    def spans(self) -> list[Span]:
        """All steps."""
        return [span for window in self.steps for span in window]

    @property
    def _pairs(self) -> list[tuple[Span, Span]]:
        """Steps and those behind them, in the same window."""
        return [pair for window in self.steps for pair in pairwise(window)]

    @property
    def gaps_us(self) -> list[float]:
        """From a step's end to the next one's begin, on the device."""
        return [after.begin_us - before.end_us for before, after in self._pairs]

    @property
    def periods_us(self) -> list[float]:
        """From a step's end to the next one's end, on the device: a gap that exceeds these is one
        in which the host paused."""
        return [after.end_us - before.end_us for before, after in self._pairs]

    @property
    def keys(self) -> float:
        """Mean keys of a row, over the steps."""
        return statistics.fmean(span_keys(span) for span in self.spans)

    @property
    def ms_by_keys(self) -> dict[str, float]:
        """Median time of a step on the device by the mean keys of its rows."""
        found: dict[int, list[float]] = defaultdict(list)
        for span in self.spans:
            found[int(span_keys(span)) // KEYS * KEYS].append(span.duration_us / 1e3)
        return {str(keys): round(statistics.median(ms), 4) for keys, ms in sorted(found.items())}

    @property
    def steps_by_sms(self) -> dict[str, int]:
        """How many steps ran on how many SMs: what a policy made of the load."""
        counted = Counter(span.place.num_sms for span in self.spans)
        return {str(num_sms): steps for num_sms, steps in sorted(counted.items())}

    def figures(self) -> dict[str, Any]:
        """TBT in ms, the prompts' tokens per ms, the steps on the device, what the chip did."""
        tbt = {f"tbt_p{n}_ms": round(percentile(self.tbt_us, n / 100) / 1e3, 3) for n in (50, 99)}
        step_us = [span.duration_us for span in self.spans]
        return {
            **tbt,
            "tbt_max_ms": round(max(self.tbt_us) / 1e3, 3),
            "tokens_per_ms": round(self.prompt_tokens / self.seconds / 1e3, 3),
            "gaps": len(self.tbt_us),
            "step_ms": round(statistics.median(step_us) / 1e3, 4),
            "step_p99_ms": round(percentile(step_us, 0.99) / 1e3, 4),
            "period_p99_ms": round(percentile(self.periods_us, 0.99) / 1e3, 4),
            "between_us": round(statistics.median(self.gaps_us), 2),
            "keys": round(self.keys, 1),
            "seconds": round(self.seconds, 2),
            "windows": len(self.windows),
            "sm_mhz": self.sm_mhz,
            "watts": self.watts,
            "compiled": self.compiled,
        }


class _Serving:
    """One `Multiplexer` under a load."""

    def __init__(
        self,
        workload: Workload,
        executor: Executor,
        policy: Policy,
        clock: Clock,
        watts: Any,
    ) -> None:
        device = executor.device
        self._load = workload
        self._now_us = device.now_us
        self._timeline = Timeline(device.num_sms, clock=device.now_us, capacity=CAPACITY)
        self._mux = Multiplexer(executor, policy=policy, timeline=self._timeline)
        self._clock, self._meter = clock, watts
        self._readings: list[Reading] = []
        draw, vocab = Random(1), executor.config.vocab_size
        made = [draw.choices(range(vocab), k=workload.prompt) for _ in range(PROMPTS)]
        # what an earlier watch left in the pool must not be found
        self._texts = _without_end(made, vocab, Random().randrange(vocab**2))
        most = executor.max_context  # all workloads' rows begin alike
        own = [draw.choices(range(vocab), k=most) for _ in range(workload.running)]
        self._own = [text[: workload.first] for text in own]
        self._params = workload.params(executor.max_context)
        self._once = SamplingParams(max_new_tokens=1, ignore_eos=True)
        self._coming: set[int] = set()
        self._rows: list[Handle] = []
        self._found = Watched()

    def run(self, seconds: float, preheat_s: float) -> Watched:
        try:
            self._fill()
            compiled = counters().compilations
            counts_from_us = self._now_us() + 1e6 * preheat_s
            self._top_up()
            while self._found.seconds < seconds:
                self._window(counts_from_us)
        finally:
            self._clear()
        self._found.compiled = counters().compilations - compiled
        return self._told()

    def _fill(self) -> None:
        """Have the rows' prompts computed, so that later they begin at once."""
        self._rows = [self._mux.submit(text, self._once) for text in self._own]
        for output in self._mux.run():
            _raise(output)

    def _top_up(self) -> None:
        while len(self._coming) < self._load.waiting:
            self._coming.add(self._mux.submit(next(self._texts), self._once).id)

    def _window(self, counts_from_us: float) -> None:
        """Replace all rows; from when they all decode on, watch them grow."""
        mux, load, found = self._mux, self._load, self._found
        rows = self._rows = [mux.submit(text, self._params, priority=1) for text in self._own]
        last = dict.fromkeys([row.id for row in rows], 0.0)
        joined = drawn = 0
        low, high = load.bounds
        begin_us, counts, gaps = 0.0, False, []
        patient_until_us, tick = self._now_us() + 1e6 * PATIENCE_S, ticking(self._clock)
        for output in mux.run():
            _raise(output)
            id_, now_us = output.id, self._now_us()
            if id_ in last:
                if last[id_] and counts:
                    gaps.append(now_us - last[id_])
                joined += not (last[id_] or begin_us)
                last[id_] = now_us
                drawn += 1
            elif id_ in self._coming:
                self._coming.discard(id_)
                self._top_up()
            if drawn >= high and begin_us:
                break
            if not begin_us and joined == len(rows) and drawn >= low:
                begin_us, counts = now_us, now_us >= counts_from_us
                last = dict.fromkeys(last, 0.0)  # the first gap begins in the window
            elif counts:
                tick()
            if now_us > patient_until_us:
                raise WatchError(
                    f"after {PATIENCE_S:g} s {joined} of {len(rows)} rows decode and have drawn "
                    f"{drawn} of {high} tokens: the policy starves them, or they need more pages"
                )
        else:
            raise WatchError("rows ended before the window did: give them a longer context")
        if counts:
            found.windows.append((begin_us, self._now_us()))
            found.tbt_us += gaps
            if self._meter is not None:
                self._meter()
                self._readings.append(self._meter.last)
        for row in rows:
            row.cancel()

    def _clear(self) -> None:
        """Let nothing be left, also where something went wrong."""
        for row in self._rows:
            row.cancel()
        for id_ in self._coming:
            self._mux.cancel(id_)
        for _ in self._mux.run():
            pass

    def _told(self) -> Watched:
        """What the timeline says of the windows."""
        found, spans = self._found, self._timeline.trace().spans
        lane = [span for span in spans if span.lane == "decode"]
        for begin, end in found.windows:
            found.prompt_tokens += tokens_within(spans, begin, end)
            found.steps.append([x for x in lane if begin <= x.begin_us and x.end_us <= end])
        found.control_us = list(self._mux.control_us)[-len(found.spans) :]
        found.sm_mhz = self._clock.mhz()
        watts = [reading[1] for reading in self._readings if reading[1] is not None]
        found.watts = round(statistics.fmean(watts), 1) if watts else None
        return found


def tokens_within(spans: Sequence[Span], begin_us: float, end_us: float) -> float:
    """Tokens of prompts that were computed in a time: a launch of some of the layers counts for
    that share of its tokens, and one that is cut by an end for the share of it that lies within."""
    total = 0.0
    for span in spans:
        size = span.size
        if size is None or not size.chunks or span.duration_us <= 0:
            continue
        within = min(span.end_us, end_us) - max(span.begin_us, begin_us)
        if within > 0:
            worth = size.new_tokens * size.layers / size.num_layers
            total += worth * within / span.duration_us
    return total


def span_keys(span: Span) -> float:
    """Mean keys of the rows of a step."""
    size = span.size
    return size.total_kv / size.batch if size is not None and size.batch else 0.0


def _without_end(texts: Sequence[list[int]], vocab: int, number: int) -> Iterator[list[int]]:
    """Texts that come again and again, each time with two first tokens that none had before."""
    while True:
        for text in texts:
            yield [number // vocab % vocab, number % vocab, *text[2:]]
            number += 1


def _raise(output: Any) -> None:
    if output.error is not None:
        raise output.error
