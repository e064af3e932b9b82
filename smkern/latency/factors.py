"""Measured factors at scattered points, and between them."""

from __future__ import annotations

from collections.abc import Iterable
from math import log2

STEPS = 8
"""Points of a doubling that are told apart: what an answer is looked up by."""
_POWER = 4
"""A factor counts by its distance to minus this, so that the nearest ones decide."""


class Factors:
    """Factors by a few positive coordinates, inversely weighted by their distance in octaves.

    A measured point's own factor comes back; points that are told apart no more share their mean.
    Answers are kept, as those of a serving loop are asked for again and again: the first at a
    point takes about 0.3 us for each that was measured, the next ones a look-up.

    Args:
        points: (coordinates, factor), all with as many coordinates; what is below 1 counts as 1.

    Example:
        >>> factors = Factors([((16, 64), 2.0), ((32, 64), 1.0)])
        >>> factors.at(16, 64), round(factors.at(23, 64), 1)
        (2.0, 1.5)
    """

    __slots__ = ("_found", "_points")

    def __init__(self, points: Iterable[tuple[tuple[float, ...], float]]) -> None:
        groups: dict[tuple[int, ...], list[float]] = {}
        for coordinates, factor in points:
            groups.setdefault(_key(coordinates), []).append(factor)
        self._points = [(key, sum(group) / len(group)) for key, group in groups.items()]
        self._found = dict(self._points)

    def __bool__(self) -> bool:
        return bool(self._points)

    def at(self, *coordinates: float) -> float:
        """The factor at a point."""
        key = _key(coordinates)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._between(key)
        return found

    def _between(self, key: tuple[int, ...]) -> float:
        total = weights = 0.0
        for other, factor in self._points:
            squares = sum((a - b) ** 2 for a, b in zip(key, other, strict=True))
            weight = squares ** (-_POWER / 2)
            weights += weight
            total += weight * factor
        return total / weights


def _key(coordinates: tuple[float, ...]) -> tuple[int, ...]:
    return tuple([round(STEPS * log2(x)) if x > 1 else 0 for x in coordinates])
