"""Tables whose cells also serve nearby problems: exact model sizes, bucketed step sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from math import log2
from operator import attrgetter
from typing import Any, ClassVar, Generic, Self, TypeVar

from smkern.device import Budget
from smkern.tuning.cells import Tuned

NEAR = 2
"""How many octaves a bucket may be off for its cell to serve: cells are measured that far apart."""


class Key:
    """Base of a table's key: a frozen, ordered dataclass.

    Fields are those of the problem by the same name, except `num_sms` and `confined`, which come
    from the budget. Fields in `BUCKETED` vary by step and are rounded up to a power of two; the
    others must match exactly.
    """

    __slots__ = ()
    BUCKETED: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, problem: Any, budget: Budget) -> Self:
        """The key of a problem in a budget; sizes that the problem lacks are 0."""
        kind: Any = cls
        values = [
            getattr(budget, name)
            if name in ("num_sms", "confined")
            else power_of_two(getattr(problem, name))
            if name in cls.BUCKETED
            else getattr(problem, name, 0)
            for name in _names(kind)
        ]
        return cls(*values)

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All fields but the buckets."""
        kind: Any = type(self)
        return _fixed(kind)(self)

    @property
    def buckets(self) -> list[int]:
        """The bucketed fields, powers of two."""
        return [getattr(self, name) for name in self.BUCKETED]


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


@cache
def _fixed(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(name for name in _names(kind) if name not in kind.BUCKETED))


K = TypeVar("K", bound=Key)
C = TypeVar("C")


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


@dataclass(slots=True)
class BucketTable(Generic[K, C]):
    """Tuned cells in memory, looked up by key."""

    meta: dict[str, Any] = field(default_factory=dict)
    cells: dict[K, Tuned[C]] = field(default_factory=dict)
    _series: dict[tuple[Any, ...], list[K]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for key in sorted(self.cells):  # type: ignore[type-var]
            self._series.setdefault(key.fixed, []).append(key)

    def series(self, wanted: K) -> Iterator[C]:
        """Configurations of the cells that differ from `wanted` in their buckets only."""
        return (self.cells[key].config for key in self._series.get(wanted.fixed, ()))

    def near(self, wanted: K) -> Iterator[C]:
        """Configurations of cells with every bucket within `NEAR`, the nearest first."""
        found: list[tuple[float, K]] = []
        for key in self._series.get(wanted.fixed, ()):
            pairs = zip(key.buckets, wanted.buckets, strict=True)
            octaves = [abs(log2(a / b)) for a, b in pairs]
            if max(octaves) <= NEAR:
                found.append((sum(octaves), key))
        return (self.cells[key].config for _, key in sorted(found))

    def nearest(self, wanted: K, is_legal: Callable[[C], bool]) -> C | None:
        """The nearest configuration that is legal for the problem, or None."""
        return next(filter(is_legal, self.near(wanted)), None)
