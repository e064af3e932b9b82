"""Pages that requests hold: allocation, sharing of prefixes, release after the last reader."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from secrets import token_bytes
from typing import Any

from smkern.errors import ArgumentError, OutOfPagesError
from smkern.kv.check import check_pool
from smkern.kv.pages import PageStates, PoolUsage, RequestPages
from smkern.kv.prefix import BlockChain, Chain, Event, PrefixIndex, block_digests
from smkern.kv.virtual import VirtualChain, VirtualTokens
from smkern.limits import as_flag, as_int

Tokens = Sequence[int] | VirtualTokens | Chain


class PagePool:
    """Pages that requests hold, with no memory behind them: for simulations.

    A request is any hashable name. `allocate` gives it pages, those of a prefix that is in the
    pool shared; `commit` says which tokens have been computed, so that later requests find them;
    `release` gives the pages back, for writing once the last reader's event is over. Pages of
    full blocks are never written again, so sharing copies nothing. Unreferenced pages of known
    blocks stay until room is needed, the longest unused going first. Every call does O(1) work a
    page that it touches; one that raises changed nothing. Not for several threads at once.
    `KvPool` is this with the pages' memory.

    Args:
        num_pages: Number of pages.
        page_size: Tokens of a page.
        reuse: Whether full blocks are found again by later requests.

    Attributes:
        num_pages, page_size, reuse: As given.
        has_memory: Whether keys and values lie behind the pages.
        states: The state of every page.
        index: The pages of known blocks.

    Raises:
        ArgumentError: numbers below 1.

    Example:
        >>> from smkern.kv import PagePool
        >>> pool = PagePool(8, 16)
        >>> pool.allocate("a", list(range(40)))
        0
        >>> pool.usage
        PoolUsage(held=3, cached=0, free=5)
    """

    has_memory = False

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True) -> None:
        self.num_pages = as_int("num_pages", num_pages, 1)
        self.page_size = as_int("page_size", page_size, 1)
        self.reuse = as_flag("reuse", reuse)
        self.states = PageStates(self.num_pages)
        self.index = PrefixIndex()
        self._held: dict[Hashable, RequestPages] = {}
        self._releases: deque[tuple[Event, list[int]]] = deque()

    def __repr__(self) -> str:
        held, cached, free = self.usage
        return (
            f"{type(self).__name__}({self.num_pages} pages of {self.page_size} tokens: "
            f"{held} held, {cached} cached, {free} free)"
        )

    @property
    def usage(self) -> PoolUsage:
        """Pages held, cached and free."""
        free, cached = self.states.num_free, self.states.num_cached
        return PoolUsage(self.num_pages - free - cached, cached, free)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones and cached ones."""
        return self.states.num_available

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """The requests that hold pages."""
        return tuple(self._held)

    @property
    def releases(self) -> tuple[tuple[Event, list[int]], ...]:
        """Releases whose event was not over when last asked, the oldest first, and their pages."""
        return tuple(self._releases)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_size)

    def chain(self, tokens: Sequence[int] | VirtualTokens) -> Chain:
        """The names of a prompt's blocks, to be kept while its request waits for pages."""
        if isinstance(tokens, VirtualTokens):
            return VirtualChain(tokens, self.page_size)
        return BlockChain(tokens, self.page_size)

    def match_prefix(self, tokens: Tokens) -> int:
        """Tokens of a prompt that are in the pool: whole pages, and never all of the prompt.

        Args:
            tokens: Token ids, or their `chain`.
        """
        return len(self._match(self._as_chain(tokens))) * self.page_size

    def shared_pages(self, tokens: Tokens, guess: int = 0) -> int:
        """Pages at a prompt's start that are held: its admission shares them, and takes none.

        Whoever holds a block holds those in front of it, so a guess that is right costs O(1), one
        that is too high O(log n).

        Args:
            tokens: Token ids, or their `chain`.
            guess: How many they may be: as many as when last asked, or all that are in the pool.
        """
        chain, refs = self._as_chain(tokens), self.states.refs
        count, most = guess, self._most_shared(chain)

        def is_free(block: int) -> bool:
            page = self.index.match(chain, block + 1, block)
            return not page or not refs[page[0]]

        if count and is_free(count - 1):
            count = bisect_left(range(count), True, key=is_free)
        while count < most and not is_free(count):
            count += 1
        return count

    def allocate(self, request: Hashable, tokens: Tokens, *, num_tokens: int | None = None) -> int:
        """Give a new request pages, all of them or none.

        Args:
            request: Its name.
            tokens: Token ids of its prompt, `VirtualTokens`, or their `chain`.
            num_tokens: Tokens to hold, the prompt's included. None: the prompt's.

        Returns:
            Tokens at the prompt's start whose keys and values are there already. At least one
            token is left to compute, since its logits are wanted.

        Raises:
            ArgumentError: an empty prompt, `num_tokens` below it, or a request that holds pages.
            OutOfPagesError: too few pages; nothing changed.
        """
        chain = self._as_chain(tokens)
        length = len(chain.tokens)
        if length < 1:
            raise ArgumentError(f"request {request!r} has no tokens: pass at least one")
        if num_tokens is None:
            num_tokens = length
        elif num_tokens < length:
            raise ArgumentError(
                f"request {request!r} has {length} tokens, num_tokens={num_tokens} is less: leave "
                "it at None, or count the prompt in"
            )
        if request in self._held:
            raise ArgumentError(
                f"request {request!r} holds {len(self._held[request].pages)} pages already: "
                "extend or release it"
            )
        shared = self._match(chain)
        count = self.pages_for(num_tokens) - len(shared)
        self._require(f"request {request!r} needs", count, shared)
        for page in shared:
            self.states.share(page)
        pages = shared + self.states.take(count, self.index.remove)
        cached = len(shared) * self.page_size
        digest = chain[len(shared) - 1] if shared else chain.root
        held = self._held[request] = RequestPages(pages, cached, cached, digest)
        if isinstance(chain, VirtualChain):
            held.names = chain.tokens
        return cached

    def extend(self, request: Hashable, num_tokens: int) -> list[int]:
        """Give a request pages for `num_tokens` tokens in all; returns the new ones.

        Raises:
            ArgumentError: the request holds nothing.
            OutOfPagesError: too few pages; it keeps what it has.
        """
        had = len(self.held(request).pages)
        self.extend_all({request: num_tokens})
        return self.held(request).pages[had:]

    def extend_all(self, num_tokens: Mapping[Any, int]) -> None:
        """Give each of these requests pages for its number of tokens, or none of them any.

        Raises:
            ArgumentError: one of them holds nothing.
            OutOfPagesError: too few pages; all keep what they have.
        """
        missing: list[tuple[list[int], int]] = []
        total, size = 0, self.page_size
        for request, tokens in num_tokens.items():
            held = self._held.get(request) or self.held(request)
            count = -(-tokens // size) - len(held.pages)
            if count > 0:
                missing.append((held.pages, count))
                total += count
        if not total:
            return
        if total > self.states.num_available:
            names = [repr(request) for request in num_tokens]
            what = f"request {names[0]} needs" if len(names) == 1 else f"{len(names)} requests need"
            self._require(what, total, ())
        pages, end = self.states.take(total, self.index.remove), 0
        for own, count in missing:
            own += pages[end : end + count]
            end += count

    def commit(
        self, request: Hashable, tokens: Sequence[int], written: Event | None = None
    ) -> None:
        """Say that the request's next tokens are computed, so that others may share full blocks.

        Args:
            request: Its name.
            tokens: Token ids, those that follow what was cached or committed.
            written: After it their keys and values are in the pages. None: they are for all who
                could ask, for instance since every reader launches on the same stream.

        Raises:
            ArgumentError: the request holds nothing, or too few pages; tokens that are no 64-bit
                integers.
        """
        held = self.held(request)
        after, room = held.num_tokens + len(tokens), len(held.pages) * self.page_size
        if after > room:
            raise ArgumentError(
                f"request {request!r} would have {after} tokens, its {len(held.pages)} pages of "
                f"{self.page_size} hold {room}: extend it first"
            )
        if not self.reuse:
            held.num_tokens = after
            return
        if held.names is not None:
            first, size = held.num_tokens // self.page_size, self.page_size
            known_as = held.names.names(first, after // size, size)
            self.index.add(known_as, held.pages[first:], written)
            held.num_tokens = after
            return
        known = held.num_tokens - len(held.tail)
        tail, size = [*held.tail, *tokens], self.page_size
        if full := len(tail) // size * size:
            digests = block_digests(held.digest, tail[:full], size)
            self.index.add(digests, held.pages[known // size :], written)
            held.digest = digests[-1]
        held.tail = tail[full:]
        held.num_tokens = after

    def release(self, request: Hashable, event: Event | None = None) -> None:
        """Give a request's pages back.

        Args:
            request: Its name, which is free from now on.
            event: Recorded behind the last launch that reads or writes its pages; polled, never
                waited for. Until it is over no page is given to be written, though cached blocks
                are shared. None: it is over.

        Raises:
            ArgumentError: the request holds nothing.
        """
        # The last block first: it is worth nothing without those before it.
        pages = self.held(request).pages[::-1]
        # An event that raises when it is asked must not take the pages with it.
        while self._releases and self._releases[0][0].query():
            self._drop(self._releases.popleft()[1])
        is_over = event is None or event.query()
        del self._held[request]
        if event is None or is_over:
            self._drop(pages)
        else:
            self._releases.append((event, pages))

    def poll(self) -> int:
        """Ask the events of past releases; returns how many are not over. Calls that lack pages
        do it themselves."""
        # All are asked first: one that raises must not leave pages dropped that are still listed.
        asked = [(release, release[0].query()) for release in self._releases]
        self._releases = deque(release for release, is_over in asked if not is_over)
        for (_, pages), is_over in asked:
            if is_over:
                self._drop(pages)
        return len(self._releases)

    def forget_prefixes(self) -> None:
        """Forget every cached block: after a change of weights, say. Requests keep their pages, and
        what they commit from now on is not found either."""
        self.states.forget_cached()
        self.index.clear()
        for held in self._held.values():  # what they compute attends to what is forgotten
            held.digest = token_bytes(16)
            if held.names is not None:
                held.names = VirtualTokens(len(held.names))

    def held(self, request: Hashable) -> RequestPages:
        """What a request holds; to be read only.

        Raises:
            ArgumentError: it holds nothing.
        """
        try:
            return self._held[request]
        except KeyError:
            raise ArgumentError(
                f"request {request!r} holds no pages: allocate first; a released request is gone"
            ) from None

    def pages(self, request: Hashable, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """The page ids of a request, in the order of its tokens; those from `start` to `stop`.

        Raises:
            ArgumentError: the request holds nothing.
        """
        held = self._held.get(request) or self.held(request)
        return tuple(held.pages[start:stop])

    def room(self, request: Hashable) -> int:
        """Tokens that the pages of a request hold.

        Raises:
            ArgumentError: the request holds nothing.
        """
        return len(self.held(request).pages) * self.page_size

    def check(self) -> None:
        """Check the accounting: every page in one state, each reference owned, nothing written
        shared.

        O(pages): for tests and for looking at a running pool, not for each step.

        Raises:
            PoolCorruptError: naming what contradicts what.
        """
        check_pool(
            self.states, self.index, self._held, [pages for _, pages in self._releases],
            page_size=self.page_size, reuse=self.reuse,
        )  # fmt: skip

    def _match(self, chain: Chain) -> list[int]:
        """The pages that a prompt could share."""
        return self.index.match(chain, self._most_shared(chain))

    def _most_shared(self, chain: Chain) -> int:
        """Blocks that a prompt may share; at least its last token is left to compute."""
        return (len(chain.tokens) - 1) // self.page_size if self.reuse else 0

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.states.drop(page, page in self.index)

    def _require(self, what: str, count: int, shared: Sequence[int]) -> None:
        """Raise OutOfPagesError unless `count` pages can be had beside the shared ones."""
        if count <= self._available(shared):
            return
        self.poll()
        available = self._available(shared)
        if count <= available:
            return
        held, cached, free = self.usage
        raise OutOfPagesError(
            f"{what} {count} more pages of {self.page_size} tokens, {available} "
            f"of {self.num_pages} can be had ({held} held, {cached} cached, {free} free): "
            "release requests, wait for their events, or make the pool larger"
        )

    def _available(self, shared: Sequence[int]) -> int:
        cached = sum(1 for page in shared if self.states.is_cached(page))
        return self.states.num_available - cached

    def _as_chain(self, tokens: Tokens) -> Chain:
        if not isinstance(tokens, (BlockChain, VirtualChain)):
            return self.chain(tokens)
        if tokens.page_size != self.page_size:
            raise ArgumentError(
                f"a chain of blocks of {tokens.page_size} tokens: this pool has pages of "
                f"{self.page_size}; make it by KvPool.chain"
            )
        return tokens
