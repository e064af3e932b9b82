"""Least squares of a few coefficients, none of which may be negative, or of any sign."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

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
    if len(rows) < len(names):
        listed = ", ".join(names)
        raise LatencyError(
            f"{what}: {len(rows)} measured for {len(names)} coefficients ({listed}); {remedy}"
        )
    relative = np.asarray(rows, float) / np.asarray(values, float)[:, None]
    scales = np.linalg.norm(relative, axis=0)
    if not scales.all():
        raise LatencyError(
            f"{what}: {names[int(scales.argmin())]} is 0 in all {len(rows)} measured, so its "
            f"coefficient is not known; {remedy}"
        )
    unit = relative / scales
    gram, target = unit.T @ unit, unit.sum(0)
    for i, name in enumerate(names):
        if _unexplained(gram, [*range(i)], i) <= _DEPENDENT:
            raise LatencyError(
                f"{what}: {name} follows from {', '.join(names[:i])} in all that was measured, so "
                f"they cannot be told apart; {remedy}"
            )
    solved, least = np.zeros(len(names)), 0.0
    # The best without a sign is tried on every set of terms: at most 15 sets of four.
    for count in range(1, len(names) + 1):
        for kept in map(list, combinations(range(len(names)), count)):
            found = np.linalg.solve(gram[np.ix_(kept, kept)], target[kept])
            gain = float(found @ target[kept])
            if found.min() >= 0 and gain > least:
                solved, least = np.zeros(len(names)), gain
                solved[kept] = found
    return tuple((solved / scales).tolist())


def fit_any_sign(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of any sign with the least sum of squared errors.

    A term that is 0 everywhere, or follows from those before it, gets 0.
    """
    terms = np.asarray(rows, float)
    scales = np.linalg.norm(terms, axis=0)
    scales[scales == 0] = 1.0
    unit = terms / scales
    gram = unit.T @ unit
    kept: list[int] = []
    for i in range(len(scales)):
        if _unexplained(gram, kept, i) > _DEPENDENT:
            kept.append(i)
    solved = np.zeros(len(scales))
    solved[kept] = np.linalg.solve(gram[np.ix_(kept, kept)], unit[:, kept].T @ np.asarray(values))
    return tuple((solved / scales).tolist())


def _unexplained(gram: np.ndarray, kept: list[int], i: int) -> float:
    """Share of column `i` that the columns kept leave."""
    found = np.linalg.solve(gram[np.ix_(kept, kept)], gram[kept, i])
    return float(gram[i, i] - found @ gram[kept, i])
