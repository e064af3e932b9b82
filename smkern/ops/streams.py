"""A device's current stream and its budget, and the stream whose memory is no partition's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from smkern.device import Budget


@dataclass(frozen=True, slots=True)
class Streams:
    """What the eager path asks of the runtime; a test puts a fake in its place.

    `current_device()` → index; `current_stream(index)` → raw stream;
    `budget(raw_stream, index)` → what that stream has; `capturing()` → of the current stream.
    """

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    budget: Callable[[int, int], Budget]
    capturing: Callable[[], bool]


def runtime_streams() -> Streams:
    """Torch's streams, and what the partition room knows of them."""
    from smkern.partition import budget_of_stream

    return Streams(
        torch._C._cuda_getDevice,
        torch._C._cuda_getCurrentRawStream,
        budget_of_stream,
        torch._C._cuda_isCurrentStreamCapturing,
    )


class Home:
    """The stream that was current first: memory allocated on it is no partition's.

    Args:
        device: Where; a CPU has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def make(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Allocate there, for the current stream."""
        if self._stream is None:
            return allocate()
        with torch.cuda.stream(self._stream):
            made = allocate()
        if not torch.cuda.is_current_stream_capturing():
            # that stream may still be busy with what these bytes held before
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return made
