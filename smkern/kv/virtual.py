"""Tokens that are known by how many they are and by the names of their blocks alone."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count

from smkern.errors import ArgumentError
from smkern.limits import as_int, shown

_OWN = count()


class VirtualTokens:
    """A prompt of which a trace tells its length and which blocks it shares, and what follows it.

    Takes the place of a list of token ids where nothing reads one: with `SimExecutor` and a pool
    without memory. A prompt of 12,000 tokens costs a name a block, not 12,000 hashes.

    Args:
        num_tokens: Tokens.
        blocks: Names of the first blocks, whole numbers of 0 to 2^63 - 1, as in a trace's
            `hash_ids`; prompts that begin with the same names begin with the same tokens. Kept, not
            copied. Tokens behind the last block are shared with nobody.
        block_tokens: Tokens of a named block, a multiple of the pool's page size.

    Raises:
        ArgumentError: counts that cannot be, or blocks that are no sequence; their names are looked
            at when the prompt is submitted.

    Example:
        >>> from smkern.kv import PagePool
        >>> pool = PagePool(64, 64)
        >>> pool.allocate("a", VirtualTokens(1100, blocks=(7, 8, 9)))
        0
        >>> pool.commit("a", range(1100))
        >>> pool.match_prefix(VirtualTokens(1300, blocks=(7, 8, 5)))
        1024
    """

    __slots__ = ("_digests", "_own", "_prompt", "block_tokens", "blocks", "length")

    def __init__(
        self, num_tokens: int, blocks: Sequence[int] = (), *, block_tokens: int = 512
    ) -> None:
        self.length = self._prompt = as_int("num_tokens", num_tokens, 1)
        if not isinstance(blocks, Sequence):
            raise ArgumentError(f"blocks={shown(blocks)}: pass a list of whole numbers")
        self.blocks = blocks
        self.block_tokens = as_int("block_tokens", block_tokens, 1)
        self._digests: list[int] = []
        self._own: int | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> range:
        """Some of the tokens, as positions: their number is all that is known of them."""
        return range(self.length)[part]

    def __delitem__(self, part: slice) -> None:
        self.length -= len(self[part])

    def __repr__(self) -> str:
        return f"VirtualTokens({self.length}, {len(self.blocks)} blocks of {self.block_tokens})"

    def copy(self) -> VirtualTokens:
        """The same prompt, for another request: what follows it is another's."""
        return VirtualTokens(self._prompt, self.blocks, block_tokens=self.block_tokens)

    def append(self, token: int) -> None:
        """One more token, whichever it is."""
        self.length += 1

    def pop(self) -> None:
        """One token less."""
        self.length -= 1

    def names(self, first: int, last: int, page_size: int) -> list[int]:
        """Names of the pages `first` to `last` (exclusive); each says all that is before it."""
        per_block = self.block_tokens // page_size
        if self.blocks and per_block * page_size != self.block_tokens:
            raise ArgumentError(
                f"blocks of {self.block_tokens} tokens in pages of {page_size}: take a page_size "
                "that divides block_tokens"
            )
        # a page that the prompt does not fill ends in tokens of its own
        named = min(last, len(self.blocks) * per_block, self._prompt // page_size)
        found: list[int] = []
        while first < named:
            block, inside = divmod(first, per_block)
            end = min(named - block * per_block, per_block)
            digest = self._digest(block)
            found += range(digest + inside, digest + end)
            first = block * per_block + end
        if first < last:
            own = self._own
            if own is None:
                own = self._own = _digest(b"own", next(_OWN))
            found += range(own + first, own + last)
        return found

    def _digest(self, block: int) -> int:
        """The name of a block and of all in front of it: that of its first page."""
        digests = self._digests
        while len(digests) <= block:
            before = digests[-1] if digests else self.block_tokens
            digests.append(_digest(before.to_bytes(17, "little"), self.blocks[len(digests)]))
        return digests[block]


class VirtualChain:
    """The names of the full blocks of virtual tokens, as `BlockChain` has those of real ones."""

    __slots__ = ("_names", "page_size", "tokens")

    root = b""

    def __init__(self, tokens: VirtualTokens, page_size: int) -> None:
        self.tokens = tokens
        self.page_size = page_size
        self._names = tokens.names(0, len(tokens) // page_size, page_size)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> int:
        return self._names[index]


def _digest(before: bytes, number: int) -> int:
    digest = blake2b(before + number.to_bytes(8, "little"), digest_size=16).digest()
    return int.from_bytes(digest, "little")
