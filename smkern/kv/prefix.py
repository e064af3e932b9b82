"""Prefix reuse: blocks of tokens have a name that says all before them, an index finds pages."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from smkern.errors import ArgumentError
from smkern.kv.virtual import VirtualChain


class Event(Protocol):
    """What is polled to learn whether work on a device is over, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...


def block_digests(before: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """The names of full blocks: 128 bits over a block's tokens and the name of all before it.

    Raises:
        ArgumentError: a token that is no integer of 64 bits.
    """
    try:
        data = array("q", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise ArgumentError(
            f"tokens {list(tokens[:8])}... are no 64-bit integers ({error}): pass token ids"
        ) from None
    digests, width = [], 8 * page_size
    for end in range(width, len(data) + 1, width):
        before = blake2b(before + data[end - width : end], digest_size=16).digest()
        digests.append(before)
    return digests


class BlockChain:
    """The names of a prompt's full blocks, made when they are first asked for and then kept.

    Keep one for a request that waits: asking again for its pages then hashes nothing.

    Args:
        tokens: Token ids of the prompt.
        page_size: Tokens of a block.

    Example:
        >>> a, b = BlockChain([1, 2, 3, 4], 2), BlockChain([1, 2, 3, 5], 2)
        >>> a[0] == b[0], a[1] == b[1]
        (True, False)
    """

    __slots__ = ("_digests", "page_size", "root", "tokens")

    def __init__(self, tokens: Sequence[int], page_size: int) -> None:
        self.tokens = tokens
        self.page_size = page_size
        self.root = blake2b(page_size.to_bytes(8), digest_size=16).digest()
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        """Full blocks of the prompt."""
        return len(self.tokens) // self.page_size

    def __getitem__(self, index: int) -> bytes:
        """The name of block `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        digests, size, known = self._digests, self.page_size, len(self._digests)
        if known <= index:  # twice as many as are known: who asks for one often asks for the next
            tokens = self.tokens[known * size : max(index + 1, 2 * known) * size]
            digests += block_digests(digests[-1] if known else self.root, tokens, size)
        return digests[index]


Chain = BlockChain | VirtualChain
"""The names of a prompt's full blocks."""


class PrefixIndex:
    """Which page holds the keys and values of a block: names to pages, one to one."""

    __slots__ = ("_digest_of", "_page_of", "_written")

    def __init__(self) -> None:
        self._page_of: dict[Any, int] = {}
        self._digest_of: dict[int, Any] = {}
        self._written: dict[int, Event] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    def items(self) -> list[tuple[Any, int]]:
        """Names and pages; for checks."""
        return list(self._page_of.items())

    def digest_of(self, page: int) -> Any:
        """The name of what a page holds, if it is known."""
        return self._digest_of.get(page)

    def add(self, digests: Iterable[Any], pages: Iterable[int], written: Event | None) -> None:
        """Say what pages hold (once `written` is over), a block each; nothing of a block that
        another page holds."""
        page_of, digest_of = self._page_of, self._digest_of
        for digest, page in zip(digests, pages, strict=False):
            if digest in page_of:
                continue
            assert page not in digest_of, page
            page_of[digest] = page
            digest_of[page] = digest
            if written is not None:
                self._written[page] = written

    def remove(self, page: int) -> None:
        """Forget what a page holds."""
        del self._page_of[self._digest_of.pop(page)]
        self._written.pop(page, None)

    def clear(self) -> None:
        """Forget what every page holds."""
        self._page_of.clear()
        self._digest_of.clear()
        self._written.clear()

    def match(self, chain: Chain, max_blocks: int, first: int = 0) -> list[int]:
        """The pages of the longest known prefix whose keys and values are written, or of its blocks
        from `first` on: those before it are not looked at."""
        pages: list[int] = []
        page_of, unwritten = self._page_of, self._written
        for index in range(first, min(max_blocks, len(chain))):
            page = page_of.get(chain[index])
            if page is None or (page in unwritten and not self._is_written(page)):
                break
            pages.append(page)
        return pages

    def _is_written(self, page: int) -> bool:
        event = self._written[page]
        if not event.query():
            return False
        del self._written[page]
        return True
