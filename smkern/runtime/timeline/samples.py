"""Many values in little memory: exact while they are few, to half a percent afterwards."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from smkern.errors import ArgumentError

EXACT = 65_536
"""Values that are kept as they are: half a MB."""
STEP = math.log(1.01)
"""Width of a bin, as a logarithm; its middle is within 0.5% of all of it."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a number of values was like; all 0 of none.

    Attributes:
        count: Values.
        mean, p50, p90, p99, max: Of them, in their unit. The q-th percentile is the smallest value
            that is at least as large as q percent of them.
    """

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Samples:
    """Collects values that are not negative.

    Args:
        exact: Values to keep as they are; with more of them percentiles are those of bins that are
            1% wide, and memory no longer grows.

    Raises:
        ArgumentError: `exact` below 0.

    Example:
        >>> samples = Samples()
        >>> for gap_us in (10.0, 20.0, 40.0):
        ...     samples.add(gap_us)
        >>> samples.distribution().p50
        20.0
    """

    def __init__(self, exact: int = EXACT) -> None:
        if exact < 0:
            raise ArgumentError(f"exact={exact}: give 0 or more")
        self._exact = exact
        self._values = array("d")
        self._bins: dict[int, int] | None = None
        self.count = 0
        self.total = 0.0
        self.max = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.count += 1
        self.total += value
        if value > self.max:
            self.max = value
        if self._bins is None:
            if len(self._values) < self._exact:
                self._values.append(value)
                return
            self._bins = {}
            for kept in self._values:
                self._bin(kept)
            self._values = array("d")
        self._bin(value)

    def distribution(self) -> Distribution:
        """Of the values so far."""
        if not self.count:
            return Distribution()
        p50, p90, p99 = self.percentiles(50, 90, 99)
        return Distribution(self.count, self.total / self.count, p50, p90, p99, self.max)

    def percentiles(self, *percents: float) -> tuple[float, ...]:
        """The smallest values that are at least as large as so many percent of all."""
        if self._bins is None:
            ordered = [(value, 1) for value in sorted(self._values)]
        else:
            ordered = [(_middle(index), n) for index, n in sorted(self._bins.items())]
        return tuple(min(self.max, self._at(ordered, percent)) for percent in percents)

    def _at(self, ordered: list[tuple[float, int]], percent: float) -> float:
        wanted = max(1, math.ceil(self.count * percent / 100 - 1e-9))
        passed = 0
        for value, count in ordered:
            passed += count
            if passed >= wanted:
                return value
        return self.max

    def _bin(self, value: float) -> None:
        assert self._bins is not None
        # Below a thousandth of the unit all is one bin.
        index = max(-700, round(math.log(value) / STEP)) if value > 0 else -700
        self._bins[index] = self._bins.get(index, 0) + 1


def _middle(index: int) -> float:
    return math.exp(index * STEP) if index > -700 else 0.0
