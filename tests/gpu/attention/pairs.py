"""Few rows that together hold every pair of values of a table of options."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

_TRIES = 40


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows (a value an option) such that any two values of different options meet in one.

    Greedy: of some random rows around a pair that is still missing, the one that brings most. The
    rows are always the same, so tests keep their names.
    """
    chance = random.Random(0)
    names = list(options)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    rows: list[dict[str, Any]] = []
    while missing:
        wanted = dict(min(missing))
        best: dict[str, int] = {}
        brought: set[Any] = set()
        for _ in range(_TRIES):
            row = {n: wanted.get(n, chance.randrange(len(options[n]))) for n in names}
            found = set(combinations(row.items(), 2)) & missing
            if len(found) > len(brought):
                best, brought = row, found
        missing -= brought
        rows.append({name: options[name][index] for name, index in best.items()})
    return rows
