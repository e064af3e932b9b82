"""The current stream of a device and its budget, as every family's eager path asks for them."""

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
