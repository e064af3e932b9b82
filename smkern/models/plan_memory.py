"""Memory of attention's plans, shared by steps that never run at the same time."""

from __future__ import annotations

import torch

from smkern.device import Budget
from smkern.ops.attention.plan import Plan, plan_sizes
from smkern.ops.streams import Home
from smkern.tuning.attention.shapes import AttentionShape

LARGE = 1 << 26
SEGMENT = 1 << 21
"""torch's allocator takes device memory in multiples of this."""


class PlanMemory:
    """Holds one plan at a time, of any size: the next one overwrites it.

    It grows on the stream that was current when it was made, so that no partition owns any of it.
    Memory that it outgrew is kept for launches and graphs that still use it.

    Args:
        device: Device of the lengths.

    Example:
        >>> import torch
        >>> from smkern.device import Budget
        >>> from smkern.tuning.attention.shapes import AttentionShape
        >>> memory = PlanMemory(torch.device("cpu"))
        >>> plan = memory.plan(AttentionShape(2, 8, 2, 64, 16, 1, 512, 2, 1024), Budget(16))
        >>> memory.num_bytes >= plan.buffer.nbytes + plan.workspace.nbytes
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._home = Home(device)
        self._buffer = torch.empty(0, dtype=torch.int32, device=device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._outgrown: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        held = (self._buffer, self._workspace, *self._outgrown)
        return sum(x.nbytes for x in held)

    def plan(self, shape: AttentionShape, budget: Budget) -> Plan:
        """A plan in this memory, yet to be written.

        Raises:
            ArgumentError: a plan of this shape has more words than an index counts.
        """
        words, num_bytes = plan_sizes(shape)
        self._buffer = self._grown(self._buffer, words)
        self._workspace = self._grown(self._workspace, num_bytes)
        return Plan(shape, budget, self._buffer[:words], self._workspace[:num_bytes])

    def reserve(self, shape: AttentionShape) -> None:
        """Grow to just fit a plan of this shape: nothing larger is expected soon.

        Raises:
            ArgumentError: a plan of this shape has more words than an index counts.
        """
        words, num_bytes = plan_sizes(shape)
        self._buffer = self._grown(self._buffer, words, exactly=True)
        self._workspace = self._grown(self._workspace, num_bytes, exactly=True)

    def _grown(self, held: torch.Tensor, size: int, exactly: bool = False) -> torch.Tensor:
        if size <= held.numel():
            return held
        room = -(-size // SEGMENT) * SEGMENT if exactly and size >= SEGMENT else _room(size)
        grown = self._home.make(lambda: torch.empty(room, dtype=held.dtype, device=self.device))
        if held.numel():
            self._outgrown.append(held)
        return grown


def _room(size: int) -> int:
    """The next power of two, in large memories the next multiple of `LARGE`."""
    return min(1 << (size - 1).bit_length(), -(-size // LARGE) * LARGE)
