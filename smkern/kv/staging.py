"""Numbers of the host to memory of a device, without waiting for either."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.kernels.driver import check, copy_async

# A send waits for the copies of this many sends ago, over unless the GPU is far behind.
RING = 4
_ALIGNMENT = 16


@dataclass(slots=True)
class _Stage:
    """Pinned memory that copies may still be reading, and the event behind them."""

    memory: Tensor
    copied: torch.cuda.Event


class Staging:
    """Copies numbers to a device in the order of the current stream, through pinned memory.

    Launches before a send read the old numbers, launches behind it the new ones. Nothing is
    launched but copies, so no SM is used. On a CPU the numbers are simply written.

    Args:
        device: Where the tensors are that are sent to.

    Example:
        >>> import torch
        >>> there = torch.zeros(4, dtype=torch.int32)
        >>> Staging(there.device).send([(there[1:3], [7, 8])])
        >>> there.tolist()
        [0, 7, 8, 0]
    """

    __slots__ = ("_next", "_ring", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring: list[_Stage] = []
        self._next = 0

    def send(self, writes: Sequence[tuple[Tensor, Sequence[int] | Sequence[float]]]) -> None:
        """Write numbers into tensors, each contiguous and as long as its numbers."""
        values = [_tensor(numbers, there.dtype) for there, numbers in writes]
        if self.device.type != "cuda":
            for (there, _), here in zip(writes, values, strict=True):
                there.copy_(here)
            return
        stage = self._stage(sum(-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in values))
        stream, copy = torch.cuda.current_stream(self.device), copy_async()
        begin = 0
        for (there, _), here in zip(writes, values, strict=True):
            staged = stage.memory[begin : begin + here.nbytes].view(here.dtype)
            staged.copy_(here)
            code = copy(there.data_ptr(), staged.data_ptr(), here.nbytes, stream.cuda_stream)
            if code:
                check(code, f"copying {here.nbytes} bytes to the device")
            begin += -(-here.nbytes // _ALIGNMENT) * _ALIGNMENT
        stage.copied.record(stream)

    def _stage(self, size: int) -> _Stage:
        """Pinned memory of at least `size` bytes that no copy reads any more."""
        if len(self._ring) < RING:
            self._ring.append(_Stage(_pinned(size), torch.cuda.Event()))
            return self._ring[-1]
        stage = self._ring[self._next]
        self._next = (self._next + 1) % RING
        stage.copied.synchronize()
        if stage.memory.numel() < size:
            stage.memory = _pinned(size)
        return stage


def _tensor(numbers: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
    """Numbers on the host. Of an array they are read at once: of 2,048 a list takes 0.1 ms."""
    if isinstance(numbers, array) and numbers.typecode == "q" and numbers:
        return torch.frombuffer(numbers, dtype=torch.int64).to(dtype)
    return torch.tensor(numbers, dtype=dtype)


def _pinned(size: int) -> Tensor:
    # A power of two, so that growing ends; at least what some decode steps need.
    num_bytes = max(16_384, 1 << (size - 1).bit_length())
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
