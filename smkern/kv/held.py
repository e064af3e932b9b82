"""What requests hold of a pool, and how much of it is held."""

from __future__ import annotations

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
