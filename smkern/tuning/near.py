"""Tables whose cells serve their neighbours: keyed by a model's numbers and buckets of a step's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import log2
from typing import Any, Generic, Protocol, Self, TypeVar

from smkern.tuning.cells import Cells, Tuned

NEAR = 2
"""Octaves that one of a cell's buckets may be off and still serve: cells are measured that far
apart."""


class Key(Protocol):
    """An ordered key."""

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the buckets."""
        ...

    @property
    def buckets(self) -> tuple[int, ...]:
        """Powers of two of what a step brings."""
        ...

    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=Key)
C = TypeVar("C")


def bucket(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


@dataclass(slots=True)
class NearTable(Generic[K, C]):
    """Tuned cells in memory, looked up by key."""

    meta: dict[str, Any] = field(default_factory=dict)
    cells: dict[K, Tuned[C]] = field(default_factory=dict)
    _series: dict[tuple[Any, ...], list[K]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for key in sorted(self.cells):
            self._series.setdefault(key.fixed, []).append(key)

    @classmethod
    def of(cls, cells: Cells[K, Tuned[C]]) -> Self:
        return cls(cells.meta, cells.cells)

    def series(self, wanted: K) -> Iterator[C]:
        """Configurations of the cells that differ from `wanted` in their buckets alone."""
        return (self.cells[key].config for key in self._series.get(wanted.fixed, ()))

    def near(self, wanted: K) -> Iterator[C]:
        """Those with no bucket further than `NEAR`, the nearest in octaves first."""
        found: list[tuple[float, K]] = []
        for key in self._series.get(wanted.fixed, ()):
            pairs = zip(key.buckets, wanted.buckets, strict=True)
            octaves = [abs(log2(a / b)) for a, b in pairs]
            if max(octaves) <= NEAR:
                found.append((sum(octaves), key))
        return (self.cells[key].config for _, key in sorted(found))

    def nearest(self, wanted: K, is_legal: Callable[[C], bool]) -> C | None:
        """The first of them that is legal where it is wanted, or None."""
        return next(filter(is_legal, self.near(wanted)), None)
