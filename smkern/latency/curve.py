"""Measured points, and lines between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

FULL = 0.6


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over one coordinate or more, linear in its logarithm and level beyond the ends.

    A point's value is a number, or a curve over the coordinates that follow; so the points need
    not form a grid.
    """

    xs: tuple[float, ...]
    values: tuple[float | Curve, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[tuple[float, ...], float]]) -> Curve:
        """Through points: (coordinates, value), all with as many coordinates, each above 0."""
        groups: dict[float, list[tuple[tuple[float, ...], float]]] = {}
        for (first, *rest), value in points:
            groups.setdefault(first, []).append((tuple(rest), value))
        xs = sorted(groups)
        values = tuple(cls.of(groups[x]) if groups[x][0][0] else groups[x][0][1] for x in xs)
        return cls(tuple(log2(x) for x in xs), values)

    def __bool__(self) -> bool:
        return bool(self.xs)

    def at(self, first: float, *rest: float) -> float:
        """The value at some coordinates; a coordinate below 1 counts as 1."""
        x = log2(first) if first > 1 else 0.0
        right = bisect_right(self.xs, x)
        if right == 0 or right == len(self.xs):
            return _value(self.values[max(right - 1, 0)], rest)
        left = right - 1
        share = (x - self.xs[left]) / (self.xs[right] - self.xs[left])
        low = _value(self.values[left], rest)
        if share == 0:
            return low
        return low + share * (_value(self.values[right], rest) - low)

    def slice(self, first: float) -> Curve:
        """The curve over the other coordinates, at a value of the first."""
        x = log2(first) if first > 1 else 0.0
        right = bisect_right(self.xs, x)
        if right == 0 or right == len(self.xs):
            return _curve(self.values[max(right - 1, 0)])
        share = (x - self.xs[right - 1]) / (self.xs[right] - self.xs[right - 1])
        low = _curve(self.values[right - 1])
        return _between(low, _curve(self.values[right]), share) if share else low


class Filled:
    """Values over two coordinates, of which some of the first have more of the second than others.

    Those with at least `FULL` of the most points give the shape, a `Curve`; what the others are
    off by at their own points is a `Curve`, too. So a place with few points follows its neighbours
    between and beyond them.

    Args:
        points: ((first, second), value), values above 0.
    """

    def __init__(self, points: Iterable[tuple[tuple[float, float], float]]) -> None:
        given = list(points)
        counts: dict[float, int] = {}
        for (first, _), _ in given:
            counts[first] = counts.get(first, 0) + 1
        least = FULL * max(counts.values(), default=0)
        self._shape = Curve.of((at, value) for at, value in given if counts[at[0]] >= least)
        self._rest = Curve.of((at, value / self._shape.at(*at)) for at, value in given)

    def __bool__(self) -> bool:
        return bool(self._shape)

    def at(self, first: float, second: float) -> float:
        """The value at some coordinates; a coordinate below 1 counts as 1."""
        return self._shape.at(first, second) * self._rest.at(first, second)


def _curve(value: float | Curve) -> Curve:
    assert isinstance(value, Curve), "a curve of one coordinate has no slice"
    return value


def _between(low: Curve, high: Curve, share: float) -> Curve:
    """A share of the way from one curve to another, at all points of both."""
    xs = tuple(sorted({*low.xs, *high.xs}))
    values: list[float | Curve] = []
    for x in xs:
        a, b = _at(low, x), _at(high, x)
        if isinstance(a, Curve) and isinstance(b, Curve):
            values.append(_between(a, b, share))
        else:
            assert not isinstance(a, Curve)
            assert not isinstance(b, Curve)
            values.append(a + share * (b - a))
    return Curve(xs, tuple(values))


def _at(curve: Curve, x: float) -> float | Curve:
    """The value at a logarithm of the first coordinate."""
    first = 2.0**x
    return curve.slice(first) if isinstance(curve.values[0], Curve) else curve.at(first)


def _value(value: float | Curve, rest: tuple[float, ...]) -> float:
    return value.at(*rest) if isinstance(value, Curve) else value
