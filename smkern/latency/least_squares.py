"""Least squares of a few coefficients, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt

from smkern.errors import LatencyError

_DEPENDENT = 1e-10
"""Share of a column that the others leave unexplained, below which it cannot be told from them."""


def fit(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    names: Sequence[str],
    *,
    what: str,
    remedy: str,
) -> tuple[float, ...]:
    """Coefficients, none negative, with the least sum of squared relative errors.

    None is negative, so that a prediction grows with each of its terms and is never below 0; errors
    are relative, so that a launch of 5 ms counts as much as one of 300.

    Args:
        rows: A launch's terms.
        values: Its time, above 0.
        names: Of the terms.
        what: What is fitted, for an error's text.
        remedy: What to do where it cannot be.

    Raises:
        LatencyError: fewer launches than terms, a term that is 0 in all of them, or one that
            follows from the others.
    """
    gram, target, scales = _normal_equations(rows, values, names, what, remedy)
    terms = range(len(names))
    _check_independent(gram, names, what, remedy)
    best: tuple[tuple[int, float], ...] = ()
    least = 0.0
    # The best without a sign is tried on every set of terms: at most 15 sets of four.
    for count in range(1, len(names) + 1):
        for kept in combinations(terms, count):
            found = _solve(gram, target, kept)
            gain = sum(x * target[i] for x, i in zip(found, kept, strict=True))
            if min(found) >= 0 and gain > least:
                best, least = tuple(zip(kept, found, strict=True)), gain
    solved = dict(best)
    return tuple(solved.get(i, 0.0) / scales[i] for i in terms)


def fit_any_sign(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of any sign with the least sum of squared errors.

    A term that is 0 everywhere, or follows from those before it, gets 0.
    """
    columns = list(zip(*rows, strict=True))
    scales = [sqrt(sum(x * x for x in column)) or 1.0 for column in columns]
    unit = [[x / scale for x in column] for column, scale in zip(columns, scales, strict=True)]
    gram = [[_dot(a, b) for b in unit] for a in unit]
    target = [_dot(column, values) for column in unit]
    kept: list[int] = []
    for i in range(len(columns)):
        if _unexplained(gram, kept, i) > _DEPENDENT:
            kept.append(i)
    solved = dict(zip(kept, _solve(gram, target, tuple(kept)), strict=True))
    return tuple(solved.get(i, 0.0) / scales[i] for i in range(len(columns)))


def _normal_equations(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    names: Sequence[str],
    what: str,
    remedy: str,
) -> tuple[list[list[float]], list[float], list[float]]:
    """Of terms over times, each scaled to length 1: their products, with ones, and the scales."""
    if len(rows) < len(names):
        listed = ", ".join(names)
        raise LatencyError(
            f"{what}: {len(rows)} measured for {len(names)} coefficients ({listed}); {remedy}"
        )
    relative = [[x / value for x in row] for row, value in zip(rows, values, strict=True)]
    columns = list(zip(*relative, strict=True))
    scales = [sqrt(_dot(column, column)) for column in columns]
    for name, scale in zip(names, scales, strict=True):
        if not scale:
            raise LatencyError(
                f"{what}: {name} is 0 in all {len(rows)} measured, so its coefficient is not "
                f"known; {remedy}"
            )
    unit = [[x / scale for x in column] for column, scale in zip(columns, scales, strict=True)]
    return [[_dot(a, b) for b in unit] for a in unit], [sum(column) for column in unit], scales


def _check_independent(
    gram: list[list[float]], names: Sequence[str], what: str, remedy: str
) -> None:
    for i, name in enumerate(names):
        if _unexplained(gram, list(range(i)), i) <= _DEPENDENT:
            others = ", ".join(names[:i])
            raise LatencyError(
                f"{what}: {name} follows from {others} in all that was measured, so they cannot "
                f"be told apart; {remedy}"
            )


def _unexplained(gram: list[list[float]], kept: Sequence[int], i: int) -> float:
    """Share of column `i` that the columns kept leave."""
    if not kept:
        return gram[i][i]
    column = [gram[j][i] for j in range(len(gram))]
    found = _solve(gram, column, tuple(kept))
    return gram[i][i] - sum(x * column[j] for x, j in zip(found, kept, strict=True))


def _solve(gram: list[list[float]], target: Sequence[float], kept: tuple[int, ...]) -> list[float]:
    """The solution over some of the columns, which are independent: Cholesky's."""
    size = len(kept)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = gram[kept[i]][kept[j]] - _dot(lower[i][:j], lower[j][:j])
            lower[i][j] = sqrt(rest) if i == j else rest / lower[j][j]
    found = [0.0] * size
    for i in range(size):
        found[i] = (target[kept[i]] - _dot(lower[i][:i], found[:i])) / lower[i][i]
    for i in reversed(range(size)):
        above = sum(lower[k][i] * found[k] for k in range(i + 1, size))
        found[i] = (found[i] - above) / lower[i][i]
    return found


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
