"""The cases of the append suite."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.bench.named import Group, named
from smkern.measure.append import AppendCase, Kind

KINDS: tuple[Kind, ...] = ("plain", "norm-rope", "fp8")
TOKENS = (8, 64, 512, 2048, 8192)
BUDGETS = (16, 32, 64, 84, 100, 116, 132)
QUICK_BUDGETS = (16, 132)
CASES = tuple(AppendCase(kind, tokens) for kind in KINDS for tokens in TOKENS)
QUICK_CASES = tuple(case for case in CASES if case.tokens in (64, 8192))


AppendGroup = Group[AppendCase]


def cases_named(names: Iterable[str]) -> tuple[AppendCase, ...]:
    """The suite's cases by parts of their names; ValueError for a name that no case has."""
    return named(CASES, names)
