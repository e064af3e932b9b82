"""Workspaces: counters and fp32 partial sums for split-K and stream-K launches.

A workspace starts with `COUNTER_BYTES` of int32 counters, zero between launches because the last
arriver resets them; partials follow. Launches that may overlap must not share one, so a workspace
belongs to a stream, and to a graph when captured: then it comes from the graph's own pool, and
zeroing its counters is recorded ahead of the first launch that uses them, so every replay starts
from zero whatever became of the replay before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.errors import ArgumentError, DeviceError
from smkern.tuning.space import COUNTER_BYTES

ALIGNMENT = 256
GROWTH = 1 << 20
"""Workspaces grow in steps of 1 MiB, so that a few sizes serve all shapes."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A workspace in use: where it is, how large, the capture it belongs to (0: none)."""

    tensor: Tensor
    pointer: int
    num_bytes: int
    capture_id: int


def capture_id(raw_stream: int) -> int:
    """The driver's id of the capture that a stream is in; 0 when it is in none.

    Raises:
        DeviceError: when the driver cannot tell.
    """
    from cuda.bindings import driver

    result = driver.cuStreamGetCaptureInfo(raw_stream)
    if int(result[0]) != 0:
        raise DeviceError(
            f"the driver cannot tell the capture of stream {raw_stream:#x} ({result[0]}): launch "
            "on a stream that is alive"
        )
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(result[2]) if result[1] == active else 0


def check_workspace(workspace: object, num_bytes: int, device: torch.device) -> int:
    """The address of a caller's workspace, checked.

    Args:
        workspace: A contiguous tensor of any dtype; its first `COUNTER_BYTES` must be zero at its
            first use and are zero again after each launch.
        num_bytes: What the launch needs.
        device: Where the launch runs.

    Raises:
        ArgumentError: too small, elsewhere, not contiguous or not aligned.
    """
    if not isinstance(workspace, Tensor):
        raise ArgumentError(f"workspace is {type(workspace).__name__}, not a torch.Tensor")
    if workspace.device != device:
        raise ArgumentError(
            f"workspace is on {workspace.device}, a on {device}: move workspace there"
        )
    if not workspace.is_contiguous():
        raise ArgumentError(f"workspace has strides {workspace.stride()}: pass a contiguous tensor")
    if workspace.nbytes < num_bytes:
        raise ArgumentError(
            f"workspace has {workspace.nbytes} bytes, this launch needs {num_bytes}: ask "
            "smkern.gemm_workspace_bytes(...), or leave workspace at None"
        )
    pointer = workspace.data_ptr()
    if pointer % ALIGNMENT:
        raise ArgumentError(
            f"workspace starts at {pointer:#x}, wanted a multiple of {ALIGNMENT}: pass a tensor of "
            "its own, not a view into one"
        )
    return pointer


class Workspaces:
    """The workspaces of one device, a stream's and a capture's apart.

    Args:
        device: Where buffers are made.
        capturing: Tells whether the current stream is being captured.
        capture_id: Tells the id of the capture that a raw stream is in.
    """

    def __init__(
        self,
        device: torch.device,
        capturing: Callable[[], bool],
        capture_id: Callable[[int], int] = capture_id,
    ) -> None:
        self.device = device
        self._capturing = capturing
        self._capture_id = capture_id
        self._of_streams: dict[int, Buffer] = {}
        self._of_captures: dict[int, Buffer] = {}
        self._lock = threading.Lock()

    def pointer(self, raw_stream: int, num_bytes: int) -> int:
        """The address of the current stream's workspace, grown to at least `num_bytes`.

        Args:
            raw_stream: The current stream; the buffer is allocated and zeroed on it.
            num_bytes: Counters and partials.
        """
        if self._capturing():
            return self._captured(raw_stream, num_bytes)
        buffer = self._of_streams.get(raw_stream)
        if buffer is not None and buffer.num_bytes >= num_bytes:
            return buffer.pointer
        with self._lock:
            # The capture that last ran on this stream is over: its pool owns the memory again.
            self._of_captures.pop(raw_stream, None)
            buffer = self._make(num_bytes, 0)
            self._of_streams[raw_stream] = buffer
        return buffer.pointer

    def discard(self, raw_stream: int) -> None:
        """Forget a stream's workspaces: after a failed launch, or before the stream is closed."""
        with self._lock:
            self._of_streams.pop(raw_stream, None)
            self._of_captures.pop(raw_stream, None)

    def _captured(self, raw_stream: int, num_bytes: int) -> int:
        """A stream is in one capture at a time, so its newer capture replaces the older's entry."""
        current = self._capture_id(raw_stream)
        with self._lock:
            buffer = self._of_captures.get(raw_stream)
            if buffer is None or buffer.capture_id != current or buffer.num_bytes < num_bytes:
                buffer = self._make(num_bytes, current)
                self._of_captures[raw_stream] = buffer
        return buffer.pointer

    def _make(self, num_bytes: int, capture: int) -> Buffer:
        rounded = -(-max(num_bytes, COUNTER_BYTES) // GROWTH) * GROWTH
        tensor = torch.empty(rounded, dtype=torch.uint8, device=self.device)
        tensor[:COUNTER_BYTES].zero_()
        return Buffer(tensor, tensor.data_ptr(), rounded, capture)
