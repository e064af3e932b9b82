"""Tokens on their way from the device to the host, without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smkern.kernels.driver import check, copy_async

ROOMS = 64
"""Reads that may be under way before more pinned memory is taken."""


class Reads:
    """Pinned memory for tokens that launches draw.

    Args:
        device: Where they are drawn.
        width: Tokens of a launch, at most.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        self._pins = device.type == "cuda"
        self._width = width
        self._free: list[Tensor] = []
        self._num_bytes = 0
        self._grow()

    @property
    def num_bytes(self) -> int:
        """Host memory, bytes."""
        return self._num_bytes

    def room(self) -> Tensor:
        """[width] int32, until it is given back."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, room: Tensor) -> None:
        """The copy into it is over, and was read."""
        self._free.append(room)

    def _grow(self) -> None:
        rooms = torch.zeros(ROOMS, self._width, dtype=torch.int32, pin_memory=self._pins)
        self._num_bytes += rooms.nbytes
        self._free += rooms.unbind()


class Read:
    """The tokens of one launch: `copy` launches, a call reads once that is over.

    Args:
        reads: Memory.
        rows: Those that count, of the tokens that are copied. None: all.
    """

    __slots__ = ("_count", "_reads", "_room", "_rows", "_tokens")

    def __init__(self, reads: Reads, rows: Sequence[int] | None = None) -> None:
        self._reads = reads
        self._rows = rows
        self._count = 0
        self._room: Tensor | None = None
        self._tokens: list[int] | None = None

    def copy(self, tokens: Tensor) -> None:
        """Copy tokens, [count] int32, contiguous, behind what draws them on this stream."""
        self._count = tokens.shape[0]
        self._room = self._reads.room()
        room = self._room[: self._count]
        if not tokens.is_cuda:
            room.copy_(tokens)
            return
        stream: int = torch._C._cuda_getCurrentRawStream(tokens.get_device())
        code = copy_async()(room.data_ptr(), tokens.data_ptr(), tokens.nbytes, stream)
        if code:
            check(code, f"copying {self._count} tokens to the host")

    def __call__(self) -> list[int]:
        """The tokens; a second time the same."""
        if self._tokens is None:
            assert self._room is not None, "a draw was read that was never launched"
            tokens: list[int] = self._room[: self._count].tolist()
            self._reads.give_back(self._room)
            self._room = None
            self._tokens = tokens if self._rows is None else [tokens[row] for row in self._rows]
        return self._tokens
