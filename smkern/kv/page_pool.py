"""The books of a KV pool with its public face: who holds which page, with or without memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from smkern.errors import ArgumentError
from smkern.kv.check import check_ledger
from smkern.kv.ledger import BlockManager, PoolUsage
from smkern.kv.prefix import BlockChain, Event


class PagePool:
    """Pages that requests hold, with no memory behind them: for simulations.

    A request is any hashable name. `allocate` gives it pages, those of a prefix that is in the
    pool shared; `commit` says which tokens have been computed, so that later requests find them;
    `release` gives the pages back, for writing once the last reader's event is over. Pages of
    full blocks are never written again, so sharing copies nothing. Unreferenced pages of known
    blocks stay until room is needed, the longest unused going first. A call that raises changed
    nothing. Not for several threads at once. `KvPool` is this with the pages' memory.

    Args:
        num_pages: Pages.
        page_size: Tokens of a page.
        reuse: Whether prefixes are found again.

    Attributes:
        num_pages: As given.

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

    def __init__(self, num_pages: int, page_size: int, *, reuse: bool = True) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ArgumentError(f"{name}={value}: give at least 1")
        self.num_pages = num_pages
        self._ledger = BlockManager(num_pages, page_size, reuse=reuse)

    def __repr__(self) -> str:
        held, cached, free = self.usage
        return (
            f"{type(self).__name__}({self.num_pages} pages of {self.page_size} tokens: "
            f"{held} held, {cached} cached, {free} free)"
        )

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._ledger.page_size

    @property
    def reuse(self) -> bool:
        """Whether prefixes are found again."""
        return self._ledger.reuse

    @property
    def usage(self) -> PoolUsage:
        """Pages held, cached and free."""
        return self._ledger.usage

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """The requests that hold pages."""
        return tuple(self._ledger.requests)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return self._ledger.pages_for(num_tokens)

    def chain(self, tokens: Sequence[int], *, salt: str = "") -> BlockChain:
        """The names of a prompt's blocks, to be kept while its request waits for pages."""
        return BlockChain(tokens, self.page_size, salt)

    def match_prefix(self, tokens: Sequence[int] | BlockChain, *, salt: str = "") -> int:
        """Tokens of a prompt that are in the pool: whole pages, and never all of the prompt.

        Args:
            tokens: Token ids, or their `chain`.
            salt: Of the prompt; a chain has its own.
        """
        return len(self._ledger.match(self._as_chain(tokens, salt))) * self.page_size

    def allocate(
        self,
        request: Hashable,
        tokens: Sequence[int] | BlockChain,
        *,
        num_tokens: int | None = None,
        salt: str = "",
    ) -> int:
        """Give a new request pages, all of them or none.

        Args:
            request: Its name.
            tokens: Token ids of its prompt, or their `chain`.
            num_tokens: Tokens to hold, the prompt's included. None: the prompt's.
            salt: Requests of different salts share no pages; a chain has its own.

        Returns:
            Tokens at the prompt's start whose keys and values are there already. At least one
            token is left to compute, since its logits are wanted.

        Raises:
            ArgumentError: an empty prompt, `num_tokens` below it, or a request that holds pages.
            OutOfPagesError: too few pages; nothing changed.
        """
        chain = self._as_chain(tokens, salt)
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
        return self._ledger.allocate(request, chain, num_tokens).cached_tokens

    def extend(self, request: Hashable, num_tokens: int) -> list[int]:
        """Give a request pages for `num_tokens` tokens in all; returns the new ones.

        Raises:
            ArgumentError: the request holds nothing.
            OutOfPagesError: too few pages; it keeps what it has.
        """
        return self._ledger.extend(request, num_tokens)

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
            ArgumentError: the request holds nothing, or too few pages.
        """
        self._ledger.commit(request, tokens, written)

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
        self._ledger.release(request, event)

    def poll(self) -> int:
        """Ask the events of past releases; returns how many are not over. Calls that lack pages
        do it themselves."""
        return self._ledger.poll()

    def forget_prefixes(self) -> None:
        """Forget every cached block: after a change of weights, say. Requests keep their pages, and
        what they commit from now on is not found either."""
        self._ledger.forget()

    def pages(self, request: Hashable, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """The page ids of a request, in the order of its tokens; those from `start` to `stop`.

        Raises:
            ArgumentError: the request holds nothing.
        """
        return tuple(self._ledger.get(request).pages[start:stop])

    def room(self, request: Hashable) -> int:
        """Tokens that the pages of a request hold.

        Raises:
            ArgumentError: the request holds nothing.
        """
        return len(self._ledger.get(request).pages) * self.page_size

    def num_tokens(self, request: Hashable) -> int:
        """Tokens of a request that are cached or committed.

        Raises:
            ArgumentError: the request holds nothing.
        """
        return self._ledger.get(request).num_tokens

    def check(self) -> None:
        """Check the books: every page in one state, each reference owned, nothing written shared.

        O(pages): for tests and for looking at a running pool, not for each step.

        Raises:
            PoolCorruptError: naming what contradicts what.
        """
        check_ledger(self._ledger)

    def _as_chain(self, tokens: Sequence[int] | BlockChain, salt: str) -> BlockChain:
        if not isinstance(tokens, BlockChain):
            return BlockChain(tokens, self.page_size, salt)
        if tokens.page_size != self.page_size or salt:
            raise ArgumentError(
                f"a chain of blocks of {tokens.page_size} tokens, salt={salt!r}: this pool has "
                f"pages of {self.page_size}; make it by KvPool.chain, and give the salt there"
            )
        return tokens
