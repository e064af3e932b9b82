"""The steady state: decode beside prefill on each rung, chunked prefill, prefill alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise

from smkern.bench.runtime.cases import AGGREGATED, ALONE, MIXED, STEADY, Cell, gap_name
from smkern.bench.runtime.figures import Spans, common, percentile, tbt
from smkern.bench.runtime.pump import Feed, pump
from smkern.bench.runtime.rig import Rig, figures_of
from smkern.runtime.device import Work

TRIES = 3
"""Forwards of each size; the first one is not counted."""
MARGINS = (1.12, 1.06, 1.0, 0.97, 0.94)
"""Of a limit: what a chunk is chosen for, as its time is known to some percent; above 1 the median,
too, may come up to the limit."""
STEADY_S, LEAST_STEPS = 1.2, 12
QUEUED = 3


def multiplexed(rig: Rig, rung: int) -> Iterator[Cell]:
    """A decode step beside prompts on a rung: its times, and the prompts' tokens per ms."""
    rig.prepare(rung)
    alone = tbt(rig.steps_alone(rung).periods_us)["tbt_p50_ms"]
    figures = figures_of(rig.together(rung))
    rate, provider = figures["tokens_per_ms"], rig.side.provider
    cell = rig.plan.cell(STEADY, provider, rate, "tokens/ms", rung=rung)
    yield cell | figures | {"alone_ms": alone}


def alone(rig: Rig) -> Iterator[Cell]:
    """Prompts on the whole device with no decode at all, and decode steps with no prompt."""
    rig.prepare(None)
    steps = tbt(rig.steps_alone(None).periods_us)
    rate = rig.prompts_alone(None)
    yield rig.plan.cell(ALONE, rig.side.provider, round(rate, 3), "tokens/ms") | {
        "decode_ms": steps["tbt_p50_ms"]
    }


def gaps(rig: Rig, rung: int) -> Iterator[Cell]:
    """The share of a step in which the decode stream has no kernel, one and two steps ahead."""
    rig.prepare(rung)
    for ahead in (1, 2):
        found = rig.together(rung, ahead=ahead)
        shares = found.steps.gap_shares
        value = statistics.median(shares)
        yield rig.plan.cell(gap_name(ahead), rig.side.provider, round(value, 5), "fraction") | {
            "p99": round(percentile(shares, 0.99), 5),
            "mean": round(statistics.fmean(shares), 5),
            "rung": rung,
            **figures_of(found),
        }


@dataclass(slots=True)
class Chunked:
    """Chunked prefill: prompts' chunks and the decode batch in one forward on the whole device."""

    rig: Rig
    times_us: dict[tuple[int, int], float] = field(default_factory=dict)

    def cells(self, limit_ms: float) -> Iterator[Cell]:
        """Under a limit, the largest chunks that keep it, for real, at some margins.

        Before the first limit: how long a forward takes, by its rows.
        """
        if not self.times_us:
            self.times_us = self._measure()
            yield from self._curve()
        for margin in MARGINS:
            yield self._cell(limit_ms, margin)

    def _cell(self, limit_ms: float, margin: float) -> Cell:
        plan, provider = self.rig.plan, self.rig.side.provider
        case = {"limit_ms": limit_ms, "margin": margin}
        count = max(LEAST_STEPS, int(STEADY_S * 1e3 / limit_ms))
        limit_us = 1e3 * limit_ms * margin
        steps = list(islice(schedule(self.times_us, limit_us, plan.tokens), count))
        spans = self._run(steps)
        settled = len(steps) // 4
        periods = spans.periods_us[settled:]
        tokens = sum(chunk for chunk, _ in steps[settled + 1 :])
        rate = 1e3 * tokens / sum(periods)
        gaps = spans.gap_shares[settled:]
        return plan.cell(AGGREGATED, provider, round(rate, 3), "tokens/ms", **case) | {
            **tbt(periods),
            "tokens_per_ms": round(rate, 3),
            "chunk": round(tokens / len(periods), 1),
            "idle_fraction": round(statistics.fmean(gaps), 5),
        }

    def _curve(self) -> Iterator[Cell]:
        """A forward's ms by its rows, the mean over where its chunk begins."""
        plan, provider = self.rig.plan, self.rig.side.provider
        by_chunk: dict[int, dict[int, float]] = {}
        for (chunk, start), us in self.times_us.items():
            by_chunk.setdefault(chunk, {})[start] = us / 1e3
        for chunk, by_start in by_chunk.items():
            value = round(statistics.fmean(by_start.values()), 4)
            yield plan.cell(MIXED, provider, value, "ms", rows=chunk + plan.batch) | {
                "chunk": chunk,
                "by_start_ms": {str(start): round(ms, 4) for start, ms in by_start.items()},
            }

    def _measure(self) -> dict[tuple[int, int], float]:
        """Microseconds of a forward by its chunk, and where the chunk begins."""
        plan = self.rig.plan
        sizes = [
            (chunk, start)
            for chunk in plan.chunks
            if chunk <= plan.tokens
            for start in sorted({0, (plan.tokens - chunk) // 2, plan.tokens - chunk})
        ]
        spans = self._run([size for size in sizes for _ in range(TRIES)])
        ends = spans.ends
        found = {}
        for index, size in enumerate(sizes):
            last = TRIES * index + TRIES - 1
            found[size] = statistics.median(
                ends[at] - ends[at - 1] for at in range(last - TRIES + 2, last + 1)
            )
        return found

    def _run(self, steps: list[tuple[int, int]]) -> Spans:
        """These forwards back to back, their ends stamped."""
        rig, marks = self.rig, self.rig.decode_marks
        runs = {size: rig.side.mixed(*size) for size in dict.fromkeys(steps)}

        def work(size: tuple[int, int]) -> Work:
            def run(place: object) -> None:
                marks.mark()
                runs[size]()
                marks.mark()

            return Work("mixed", run)

        lanes = rig.lanes(None)
        feed = Feed("decode", QUEUED, iter([work(size) for size in steps]))
        pump(lanes, [feed], lambda: feed.launched < len(steps))
        spans = Spans.of(marks.us())
        assert len(spans.ends) == len(steps), "a forward for each that was launched"
        begin, end = common(spans.ends, settle=0.0)
        return spans.within(min(begin, spans.begins[0]), end)


def schedule(
    times_us: Mapping[tuple[int, int], float], limit_us: float, tokens: int
) -> Iterator[tuple[int, int]]:
    """(chunk, where it begins) without end: each the largest whose forward keeps the limit.

    Where none does it is the smallest, as prompts must go on.

    Args:
        times_us: By chunk and start.
        limit_us: Of a forward.
        tokens: Of each prompt; a chunk that runs over its end goes on in the next one.
    """
    chunks = sorted({chunk for chunk, _ in times_us}, reverse=True)
    start = 0
    while True:
        fits = (chunk for chunk in chunks if _expected(times_us, chunk, start) <= limit_us)
        chunk = next(fits, chunks[-1])
        yield chunk, start
        start = (start + chunk) % tokens


def _expected(times_us: Mapping[tuple[int, int], float], chunk: int, start: int) -> float:
    """Of a chunk from a start on, between those that were measured."""
    known = sorted((at, us) for (size, at), us in times_us.items() if size == chunk)
    if start >= known[-1][0]:
        return known[-1][1]
    for (low, low_us), (high, high_us) in pairwise(known):
        if low <= start <= high:
            return low_us + (high_us - low_us) * (start - low) / (high - low)
    return known[0][1]
