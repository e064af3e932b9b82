"""The paged memory of a rank that gives out no pages: another one does, and tells which."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from smkern.errors import ArgumentError
from smkern.kv.pool import KvPool


class KvReplica(KvPool):
    """A pool whose requests hold what they hold in another rank's `KvPool` of the same size.

    Example:
        >>> from smkern.kv import KvReplica, KvSizes
        >>> pool = KvReplica(KvSizes(2, num_kv_heads=1, head_dim=64), num_pages=8, device="cpu")
        >>> pool.tell("a", 0, (5, 3))
        >>> pool.tell("a", 2, (4,))
        >>> pool.pages("a", 1)
        (3, 4)
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._told: dict[Hashable, list[int]] = {}

    def tell(self, request: Hashable, first: int, pages: Sequence[int]) -> None:
        """A request holds these pages from its `first` on."""
        self._told.setdefault(request, [])[first:] = pages

    def forget(self, request: Hashable) -> None:
        """A request holds nothing any more."""
        self._told.pop(request, None)

    def pages(self, request: Hashable, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """The page ids of a request, in the order of its tokens."""
        return tuple(self._told.get(request, ())[start:stop])

    def allocate(self, *args: Any, **options: Any) -> int:
        """Refused: rank 0 gives out the pages.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            "this pool is another rank's replica: submit requests on rank 0, which gives out pages"
        )
