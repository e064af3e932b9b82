"""Requests and their pages: allocation, sharing of prefixes, release after the last reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import NamedTuple

from smkern.errors import ArgumentError, OutOfPagesError
from smkern.kv.pages import PageStates
from smkern.kv.prefix import BlockChain, Event, PrefixIndex, block_digest


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
    """

    pages: list[int]
    cached_tokens: int
    num_tokens: int
    digest: bytes
    tail: list[int] = field(default_factory=list)


class PoolUsage(NamedTuple):
    """How many pages are in which state; they add up to the pool.

    Attributes:
        held: Of requests, or of released ones that a device still reads.
        cached: Of nobody, kept for prefixes; given away when no page is free.
        free: The rest.
    """

    held: int
    cached: int
    free: int


class BlockManager:
    """The books of a KV pool: plain Python, no tensors.

    Every call does O(1) work a page that it touches. A call that raises changed nothing. Not for
    several threads at once.

    Args:
        num_pages: Pages in all.
        page_size: Tokens of a page.
        reuse: Whether full blocks are found again by later requests.
    """

    __slots__ = ("_releases", "_requests", "index", "page_size", "reuse", "states")

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True) -> None:
        self.page_size = page_size
        self.reuse = reuse
        self.states = PageStates(num_pages)
        self.index = PrefixIndex()
        self._requests: dict[Hashable, RequestPages] = {}
        self._releases: deque[tuple[Event, list[int]]] = deque()

    @property
    def requests(self) -> dict[Hashable, RequestPages]:
        """The requests that hold pages, by name; to be read only."""
        return self._requests

    @property
    def releases(self) -> list[tuple[Event, list[int]]]:
        """Releases whose event was not over when last asked, the oldest first."""
        return list(self._releases)

    @property
    def usage(self) -> PoolUsage:
        free, cached = self.states.num_free, self.states.num_cached
        return PoolUsage(self.states.num_pages - free - cached, cached, free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_size)

    def get(self, request: Hashable) -> RequestPages:
        """What a request holds.

        Raises:
            ArgumentError: it holds nothing.
        """
        try:
            return self._requests[request]
        except KeyError:
            raise ArgumentError(
                f"request {request!r} holds no pages: allocate first; a released request is gone"
            ) from None

    def match(self, chain: BlockChain) -> list[int]:
        """The pages that a prompt could share; at least its last token is left to compute."""
        if not self.reuse:
            return []
        return self.index.match(chain, (len(chain.tokens) - 1) // self.page_size)

    def allocate(self, request: Hashable, chain: BlockChain, num_tokens: int) -> RequestPages:
        """Give a new request pages for `num_tokens` tokens, those of its known prefix shared.

        Raises:
            ArgumentError: the request holds pages already.
            OutOfPagesError: too few pages.
        """
        if request in self._requests:
            raise ArgumentError(
                f"request {request!r} holds {len(self._requests[request].pages)} pages already: "
                "extend or release it"
            )
        shared = self.match(chain)
        count = self.pages_for(num_tokens) - len(shared)
        self._require(request, count, shared)
        for page in shared:
            self.states.share(page)
        pages = shared + self.states.take(count, self.index.remove)
        cached = len(shared) * self.page_size
        digest = chain[len(shared) - 1] if shared else chain.root
        held = self._requests[request] = RequestPages(pages, cached, cached, digest)
        return held

    def extend(self, request: Hashable, num_tokens: int) -> list[int]:
        """Give a request pages for `num_tokens` tokens in all; returns the new pages.

        Raises:
            ArgumentError: the request holds nothing.
            OutOfPagesError: too few pages; it keeps what it has.
        """
        held = self.get(request)
        count = self.pages_for(num_tokens) - len(held.pages)
        if count <= 0:
            return []
        self._require(request, count, ())
        pages = self.states.take(count, self.index.remove)
        held.pages += pages
        return pages

    def commit(
        self, request: Hashable, tokens: Sequence[int], written: Event | None = None
    ) -> None:
        """Say that the keys and values of a request's next tokens are written after `written`.

        Raises:
            ArgumentError: the request holds nothing, or too few pages for them; tokens that are
                no 64-bit integers.
        """
        held = self.get(request)
        after, room = held.num_tokens + len(tokens), len(held.pages) * self.page_size
        if after > room:
            raise ArgumentError(
                f"request {request!r} would have {after} tokens, its {len(held.pages)} pages of "
                f"{self.page_size} hold {room}: extend it first"
            )
        if not self.reuse:
            held.num_tokens = after
            return
        known = held.num_tokens - len(held.tail)
        tail, size = [*held.tail, *tokens], self.page_size
        digests, digest = [], held.digest
        for start in range(0, len(tail) - size + 1, size):
            digest = block_digest(digest, tail[start : start + size])
            digests.append(digest)
        for number, name in enumerate(digests, known // size):
            self.index.add(name, held.pages[number], written)
        held.digest = digest
        held.tail = tail[len(digests) * size :]
        held.num_tokens = after

    def release(self, request: Hashable, event: Event | None = None) -> None:
        """Let go of a request's pages; none of them is written anew before `event` is over.

        Raises:
            ArgumentError: the request holds nothing.
        """
        # The last block first: it is worth nothing without those before it.
        pages = self.get(request).pages[::-1]
        # An event that raises when it is asked must not take the pages with it.
        while self._releases and self._releases[0][0].query():
            self._drop(self._releases.popleft()[1])
        is_over = event is None or event.query()
        del self._requests[request]
        if event is None or is_over:
            self._drop(pages)
        else:
            self._releases.append((event, pages))

    def poll(self) -> int:
        """Drop what was released and is no longer read; returns the releases still waiting."""
        # All are asked first: one that raises must not leave pages dropped that are still listed.
        asked = [(release, release[0].query()) for release in self._releases]
        self._releases = deque(release for release, is_over in asked if not is_over)
        for (_, pages), is_over in asked:
            if is_over:
                self._drop(pages)
        return len(self._releases)

    def forget(self) -> None:
        """Forget every known prefix; requests keep their pages."""
        self.states.forget_cached()
        self.index.clear()
        # What they compute from now on attends to what is forgotten, so nobody may find it either.
        for held in self._requests.values():
            held.digest = token_bytes(len(held.digest))

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.states.drop(page, page in self.index)

    def _require(self, request: Hashable, count: int, shared: Sequence[int]) -> None:
        if count <= self._available(shared):
            return
        self.poll()
        available = self._available(shared)
        if count <= available:
            return
        held, cached, free = self.usage
        raise OutOfPagesError(
            f"request {request!r} needs {count} more pages of {self.page_size} tokens, {available} "
            f"of {self.states.num_pages} can be had ({held} held, {cached} cached, {free} free): "
            "release requests, wait for their events, or make the pool larger"
        )

    def _available(self, shared: Sequence[int]) -> int:
        cached = sum(1 for page in shared if self.states.is_cached(page))
        return self.states.num_available - cached
