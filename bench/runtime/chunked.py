"""Chunked prefill: prompts' chunks and the decode batch in one forward on the whole device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise

from smkern.bench.runtime.cases import AGGREGATED, MIXED, Cell
from smkern.bench.runtime.figures import Spans, common, tbt
from smkern.bench.runtime.steady_bench import Feed, SteadyBench, pump
from smkern.measure.captured import Run
from smkern.runtime.device import Work
from smkern.runtime.place import Place

TRIES = 3
"""Forwards of each size; the first one is not counted."""
MARGINS = (1.12, 1.06, 1.0, 0.97, 0.94)
"""Shares of a limit that a chunk is chosen for, as its time is known to some percent; above 1 the
median, too, may come up to the limit."""
STEADY_S, LEAST_STEPS = 1.2, 12
QUEUED = 3


@dataclass(slots=True)
class Chunked:
    """Forwards of chunks and the decode batch, and the rates that they give under a limit."""

    bench: SteadyBench
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
        plan = self.bench.plan
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
        return self.bench.cell(AGGREGATED, round(rate, 3), "tokens/ms", **case) | {
            **tbt(periods),
            "tokens_per_ms": round(rate, 3),
            "chunk": round(tokens / len(periods), 1),
            "idle_fraction": round(statistics.fmean(gaps), 5),
        }

    def _curve(self) -> Iterator[Cell]:
        """A forward's ms by its rows, the mean over where its chunk begins."""
        by_chunk: dict[int, dict[int, float]] = {}
        for (chunk, start), us in self.times_us.items():
            by_chunk.setdefault(chunk, {})[start] = us / 1e3
        for chunk, by_start in by_chunk.items():
            value = round(statistics.fmean(by_start.values()), 4)
            rows = chunk + self.bench.plan.batch
            yield self.bench.cell(MIXED, value, "ms", rows=rows) | {
                "chunk": chunk,
                "by_start_ms": {str(start): round(ms, 4) for start, ms in by_start.items()},
            }

    def _measure(self) -> dict[tuple[int, int], float]:
        """Microseconds of a forward by its chunk, and where the chunk begins."""
        plan = self.bench.plan
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
        runs = {size: self.bench.steps.mixed(*size).run for size in dict.fromkeys(steps)}
        spans = back_to_back(self.bench, [runs[size] for size in steps])
        begin, end = common(spans.ends, settle=0.0)
        return spans.within(min(begin, spans.begins[0]), end)


def back_to_back(bench: SteadyBench, runs: list[Run]) -> Spans:
    """Forwards on the whole device one behind another: when each began and ended."""
    marks = bench.decode_marks

    def work(run: Run) -> Work:
        def stamped(place: Place) -> None:
            marks.mark()
            run()
            marks.mark()

        return Work("mixed", stamped)

    feed = Feed("decode", QUEUED, iter([work(run) for run in runs]))
    pump(bench.lanes(None), [feed], lambda: feed.launched < len(runs))
    spans = Spans.of(marks.us())
    assert len(spans.ends) == len(runs), "a forward for each that was launched"
    return spans


def schedule(
    times_us: Mapping[tuple[int, int], float], limit_us: float, tokens: int
) -> Iterator[tuple[int, int]]:
    """(chunk, where it begins) without end: each the largest whose forward keeps the limit.

    Where none does it is the smallest, as prompts must go on.

    Args:
        times_us: Time of a forward, by chunk and start.
        limit_us: Limit of a forward.
        tokens: Tokens of each prompt; a chunk that runs over its end goes on in the next one.
    """
    chunks = sorted({chunk for chunk, _ in times_us}, reverse=True)
    start = 0
    while True:
        fits = (chunk for chunk in chunks if _expected(times_us, chunk, start) <= limit_us)
        chunk = next(fits, chunks[-1])
        yield chunk, start
        start = (start + chunk) % tokens


def _expected(times_us: Mapping[tuple[int, int], float], chunk: int, start: int) -> float:
    """Time of a chunk from a start on, between those that were measured."""
    known = sorted((at, us) for (size, at), us in times_us.items() if size == chunk)
    if start >= known[-1][0]:
        return known[-1][1]
    for (low, low_us), (high, high_us) in pairwise(known):
        if low <= start <= high:
            return low_us + (high_us - low_us) * (start - low) / (high - low)
    return known[0][1]
