"""The largest chunk of prompts that a forward with all decode rows may have under a limit."""

from __future__ import annotations

from smkern.policies.admission import Batch, chunks_of
from smkern.policies.pricing import Prices
from smkern.policies.search import largest
from smkern.policies.snapshot import Snapshot

QUANTUM = 64
"""Rows of a forward under a limit are a multiple of it, decode rows among them: one row more takes
another tile in every GEMM."""
LEAST = 32
"""New tokens of a forward under a limit, at least: prompts go on even where the decode rows alone
exceed it."""


class ChunkSize:
    """Finds the largest chunk; remembers the last, for it changes little from forward to forward.

    Chunks grow by tiles: the first fills those that the decode rows have begun, joining requests'
    among them, so that a forward has no tile that is nearly empty.
    """

    def __init__(self) -> None:
        self._near = 1

    def largest(
        self, snapshot: Snapshot, prices: Prices, waiting: Batch, most: int, limit_us: float
    ) -> tuple[int, float]:
        """New tokens of a chunk, and its forward's time.

        Args:
            snapshot: The moment.
            prices: Of the moment.
            waiting: Requests that it takes tokens of, in their order.
            most: Tokens that it may have.
            limit_us: Time that its forward may take; the least chunk takes longer where none fits.
        """
        first = -prices.step.batch % QUANTUM
        first += QUANTUM * (first < LEAST)
        useful = min(sum(request.tokens for request in waiting), most)

        found: dict[int, float] = {}

        def mixed_us(count: int) -> float:
            us = found.get(count)
            if us is None:
                tokens = first + QUANTUM * (count - 1)
                us = found[count] = prices.mixed_us(chunks_of(waiting, tokens))
            return us

        highest = max(1, 1 + -(-(useful - first) // QUANTUM))
        count = largest(lambda count: mixed_us(count) <= limit_us, highest, self._near)
        self._near = max(count, self._near) if count == highest else count
        return min(first + QUANTUM * (count - 1), most), mixed_us(count)
