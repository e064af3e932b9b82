"""What a service must keep, and watching a replay until it is certain that it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from smkern.errors import ArgumentError
from smkern.limits import as_float
from smkern.replay.records import Record, Served

TOLERATED = 0.01
"""Share of gaps, and of first tokens, that may be late."""


@dataclass(frozen=True, slots=True)
class Slo:
    """p99 of the time between tokens within its limit, and 99% of first tokens within theirs; the
    first token of a request that failed counts as late.

    Attributes:
        tbt_ms: Limit of the gap between two tokens of a request.
        tolerated: Share of gaps and of first tokens that may be later.
    """

    tbt_ms: float
    tolerated: float = TOLERATED

    def __post_init__(self) -> None:
        if not 0 < as_float("tbt_ms", self.tbt_ms) < inf:
            raise ArgumentError(f"tbt_ms={self.tbt_ms}: give a finite time above 0")
        if not 0 <= as_float("tolerated", self.tolerated) < 1:
            raise ArgumentError(f"tolerated={self.tolerated}: give a share of at least 0, below 1")

    def attainment(self, served: Served) -> tuple[float, float]:
        """Shares of gaps, and of first tokens, within their limits; 1 where there is none."""
        gaps, counted = served.gaps_s(), served.counted
        late = float(np.count_nonzero(gaps > 1e-3 * self.tbt_ms))
        tbt = 1.0 - late / len(gaps) if len(gaps) else 1.0
        missed = sum(record.misses for record in counted)
        return tbt, 1.0 - missed / len(counted) if counted else 1.0

    def is_met(self, served: Served) -> bool:
        """Whether a replay keeps it; one that was stopped does not."""
        return not served.stopped and min(self.attainment(served)) >= 1.0 - self.tolerated

    def watch(self, records: Sequence[Record], warm_s: float) -> Watch:
        """Whether a replay can still keep it."""
        return Watch(self, records, warm_s)


class Watch:
    """Says as soon as it is certain that a replay misses its limits: the rest need not be run.

    Gaps of requests that ended are counted against all gaps that the trace will ever have; first
    tokens that are overdue, and requests that failed behind them, against all requests.

    Args:
        records: The requests, in the order of their arrivals.
        warm_s: What was before is not counted.
    """

    def __init__(self, slo: Slo, records: Sequence[Record], warm_s: float) -> None:
        self._records = records
        self._warm_s = warm_s
        self._tbt_s = 1e-3 * slo.tbt_ms
        counted = [number for number, x in enumerate(records) if x.at_s >= warm_s]
        self._due = sorted(counted, key=lambda n: records[n].at_s + records[n].limit_s)
        self._next = 0
        self._overdue = 0
        self._failed = 0
        """Requests that failed after a first token in time; others are overdue."""
        self._late = 0
        self._overdue_most = slo.tolerated * len(counted)
        self._late_most = slo.tolerated * sum(x.output_tokens - 1 for x in records)

    def ended(self, record: Record) -> None:
        """A request's tokens are all there, or it failed."""
        if record.at_s >= self._warm_s:
            self._failed += record.misses and record.ttft_s <= record.limit_s
        times = np.asarray(record.token_s)
        late = (np.diff(times) > self._tbt_s) & (times[1:] >= self._warm_s)
        self._late += int(np.count_nonzero(late & (times[1:] <= self._records[-1].at_s)))

    def verdict(self, now_s: float, first_s: Callable[[int], float]) -> str:
        """Why the limits cannot be kept any more; "": they can.

        Args:
            now_s: The time.
            first_s: first_s(number of a request): when its first token came; infinity: not yet.
        """
        due, records = self._due, self._records
        while self._next < len(due):
            number = due[self._next]
            limit_s = records[number].at_s + records[number].limit_s
            if limit_s >= now_s:
                break
            self._overdue += first_s(number) > limit_s
            self._next += 1
        if self._overdue + self._failed > self._overdue_most:
            failed = f" and {self._failed} requests failed" if self._failed else ""
            return f"{self._overdue} first tokens late{failed} at {now_s:.1f} s"
        if self._late > self._late_most:
            return f"{self._late} gaps late at {now_s:.1f} s"
        return ""
