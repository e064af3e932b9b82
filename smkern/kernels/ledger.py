"""The kernels that this process has compiled and loaded, of all families."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Counters:
    """How many variants were compiled (or fetched from disk) and how many modules were loaded."""

    compilations: int
    module_loads: int


@cache
def ledger() -> list[object]:
    """Every kernel variant that this process has compiled (or fetched from disk) and loaded."""
    return []


def counters() -> Counters:
    """How many kernels this process has compiled and loaded so far: it only grows.

    It must not grow in a serving loop; `smkern.warmup` makes sure of that.
    """
    return Counters(compilations=len(ledger()), module_loads=len(ledger()))
