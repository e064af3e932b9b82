"""From stamped moments to figures: step times, gaps, rates while both lanes were busy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SETTLE = 0.25
"""Share of the common time that is left out at its start, while clocks are still falling."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed, by nearest rank; `values` not empty."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


@dataclass(frozen=True, slots=True)
class Spans:
    """Steps of a lane in order: when each began and ended, us."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]

    @classmethod
    def of(cls, moments: Sequence[float]) -> Spans:
        """From stamps that begin and end a step by turns."""
        count = len(moments) // 2
        return cls(tuple(moments[0 : 2 * count : 2]), tuple(moments[1 : 2 * count : 2]))

    def within(self, begin: float, end: float) -> Spans:
        kept = [
            (b, e) for b, e in zip(self.begins, self.ends, strict=True) if b >= begin and e <= end
        ]
        return Spans(tuple(b for b, _ in kept), tuple(e for _, e in kept))

    @property
    def periods_us(self) -> list[float]:
        """From end to end: what a request waits between two tokens."""
        return [b - a for a, b in pairwise(self.ends)]

    @property
    def gap_shares(self) -> list[float]:
        """The share of each period from a step's end to the next one's beginning."""
        gaps = zip(self.ends, self.begins[1:], self.ends[1:], strict=False)
        return [(begin - before) / (end - before) for before, begin, end in gaps if end > before]


def common(*lanes: Sequence[float], settle: float = SETTLE) -> tuple[float, float]:
    """The time in which all of some lists of moments go on, its start left out."""
    begin = max(moments[0] for moments in lanes)
    end = min(moments[-1] for moments in lanes)
    return begin + settle * (end - begin), end


def settled(moments: Sequence[float], settle: float = SETTLE) -> tuple[float, ...]:
    """All but the first share of some moments."""
    return tuple(moments[int(settle * len(moments)) :])


def rate(ends: Sequence[float], worth: float, begin: float, end: float) -> float:
    """Worth per ms of the launches that end within a time; `worth` each."""
    inside = [moment for moment in ends if begin <= moment <= end]
    if len(inside) < 2:
        raise ValueError(
            f"{len(inside)} groups ended in the {(end - begin) / 1e3:.1f} ms that both lanes were "
            "busy: measure for longer"
        )
    return 1e3 * worth * (len(inside) - 1) / (inside[-1] - inside[0])


def tbt(periods_us: Sequence[float]) -> dict[str, Any]:
    """p50, p90 and p99 in ms, how many, and each, so that rounds can be put together."""
    return tbt_of([round(us / 1e3, 4) for us in periods_us])


def tbt_of(steps_ms: Sequence[float]) -> dict[str, Any]:
    """As `tbt`, of times in ms."""
    return {
        "tbt_p50_ms": round(statistics.median(steps_ms), 4),
        "tbt_p90_ms": percentile(steps_ms, 0.90),
        "tbt_p99_ms": percentile(steps_ms, 0.99),
        "steps": len(steps_ms),
        "steps_ms": list(steps_ms),
    }
