"""Tokens on their way from the device to the host, without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smkern.kernels.driver import check, copy_async

ROOMS = 64
"""Reads that may be under way before more pinned memory is taken."""


class TokenBuffer(NamedTuple):
    """Memory of one read, looked up when it is taken: not between a step and the next.

    `memory`: [width] int32, on the host. `address`: of it. `numbers`: a view of it.
    """

    memory: Tensor
    address: int
    numbers: memoryview


class Source(NamedTuple):
    """Tokens to be copied, and what a copy must know of them.

    `batch`: How many. `gpu`: Its index; -1: they are on the host.
    """

    tokens: Tensor
    batch: int
    address: int
    num_bytes: int
    gpu: int

    @classmethod
    def of(cls, tokens: Tensor) -> Source:
        """Tokens, [count] int32, contiguous."""
        gpu = tokens.get_device() if tokens.is_cuda else -1
        return cls(tokens, tokens.shape[0], tokens.data_ptr(), tokens.nbytes, gpu)


class Reads:
    """Pinned memory for tokens that launches draw.

    Args:
        device: Where they are drawn.
        width: Tokens of a launch, at most.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        self._pins = device.type == "cuda"
        self._width = width
        self._free: list[TokenBuffer] = []
        self._grow()

    def room(self) -> TokenBuffer:
        """Memory, until it is given back."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def reserve(self) -> None:
        """Have memory for another read, as far as it can be had."""
        if not self._free:
            self._grow()

    def give_back(self, room: TokenBuffer) -> None:
        """The copy into it is over, and was read."""
        self._free.append(room)

    def _grow(self) -> None:
        rooms = torch.zeros(ROOMS, self._width, dtype=torch.int32, pin_memory=self._pins)
        self._free += [TokenBuffer(x, x.data_ptr(), x.numpy().data) for x in rooms.unbind()]


class Read:
    """The tokens of one launch: `copy` launches, a call reads once that is over.

    Args:
        reads: Memory; some of it is taken by `copy`, so that a launch that is dropped has none.
        rows: Those that count, of the tokens that are copied. None: all.
    """

    __slots__ = ("_count", "_reads", "_room", "_rows", "_tokens")

    def __init__(self, reads: Reads, rows: Sequence[int] | None = None) -> None:
        self._reads = reads
        self._rows = rows
        self._count = 0
        self._room: TokenBuffer | None = None
        self._tokens: list[int] | None = None

    def reserve(self) -> None:
        """Have the memory that `copy` takes: where there is none, this raises, not that."""
        self._reads.reserve()

    def copy(self, source: Source) -> None:
        """Copy tokens behind what draws them on this stream."""
        self._count, room = source.batch, self._reads.room()
        self._room = room
        if source.gpu < 0:
            room.memory[: source.batch].copy_(source.tokens)
            return
        stream: int = torch._C._cuda_getCurrentRawStream(source.gpu)
        code = copy_async()(room.address, source.address, source.num_bytes, stream)
        if code:
            check(code, f"copying {source.batch} tokens to the host")

    def __call__(self) -> list[int]:
        """The tokens; a second time the same."""
        if self._tokens is None:
            assert self._room is not None, "a draw was read that was never launched"
            tokens: list[int] = self._room.numbers[: self._count].tolist()
            self._reads.give_back(self._room)
            self._room = None
            self._tokens = tokens if self._rows is None else [tokens[row] for row in self._rows]
        return self._tokens
