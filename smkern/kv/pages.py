"""What is known of a pool's pages: what requests hold, and the state of each page."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smkern.kv.virtual import VirtualTokens


@dataclass(slots=True)
class RequestPages:
    """What a request holds.

    Attributes:
        pages: Its pages in the order of its tokens; the first may be shared, and no page is
            written once its block is full.
        cached_tokens: Tokens whose keys and values were there when it came.
        num_tokens: Tokens whose keys and values are written or being written.
        tail: The tokens behind the last full block.
        digest: The name of all full blocks.
        names: Names the blocks, where no token is known; then there is no tail.
    """

    pages: list[int]
    cached_tokens: int
    num_tokens: int
    digest: Any
    tail: list[int] = field(default_factory=list)
    names: VirtualTokens | None = None


class PoolUsage(NamedTuple):
    """How many pages are in which state; they add up to the pool.

    Attributes:
        held: Pages of requests, or of released ones that a device still reads.
        cached: Pages of no request, kept for prefixes; given away when no page is free.
        free: The rest.
    """

    held: int
    cached: int
    free: int


class PageStates:
    """The state of every page of a pool, each change in O(1); knows numbers only.

    A page is held (it is referenced), cached (it is not, but its contents are worth
    keeping; the longest unused is evicted first) or free.

    Attributes:
        num_pages: Pages in all.
        refs: References of each page.
    """

    __slots__ = ("_cached", "_free", "_fresh", "num_pages", "refs")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = array("i", [0]) * num_pages
        # Pages from _fresh on were never used: a pool of 1M pages lists none of them.
        self._fresh = 0
        self._free: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_pages - self._fresh

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `take` could give: free ones and cached ones."""
        return len(self._free) + self.num_pages - self._fresh + len(self._cached)

    def is_cached(self, page: int) -> bool:
        return page in self._cached

    def free_pages(self) -> list[int]:
        """The free pages, one by one; for checks."""
        return [*self._free, *range(self._fresh, self.num_pages)]

    def cached_pages(self) -> list[int]:
        """The cached pages, the next to be evicted first; for checks."""
        return list(self._cached)

    def take(self, count: int, evicted: Callable[[int], None]) -> list[int]:
        """Pages with one reference each, the free ones first; `evicted` hears of the others."""
        assert count <= self.num_available, (count, self.num_available)
        kept = max(len(self._free) - count, 0)
        pages = self._free[kept:][::-1]
        del self._free[kept:]
        first = self._fresh
        self._fresh = min(first + count - len(pages), self.num_pages)
        pages += range(first, self._fresh)
        while len(pages) < count:
            page, _ = self._cached.popitem(last=False)
            evicted(page)
            pages.append(page)
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more reference to a page that is held or cached."""
        if self.refs[page] == 0:
            del self._cached[page]
        self.refs[page] += 1

    def drop(self, page: int, keep: bool) -> None:
        """One reference less; without any, the page is cached if `keep`, else free."""
        assert self.refs[page] > 0, page
        self.refs[page] -= 1
        if self.refs[page] == 0:
            if keep:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget_cached(self) -> None:
        """Make every cached page free."""
        self._free.extend(self._cached)
        self._cached.clear()
