"""Workspaces: counters and fp32 partial sums for split-K and stream-K launches.

A workspace starts with `COUNTER_BYTES` of int32 counters, zero between launches because the last
arriver resets them; partials follow. Launches that may overlap must not share one, so a workspace
belongs to a stream, and to a graph when captured: then it comes from the graph's own pool, and
zeroing its counters is recorded ahead of the first launch that uses them, so every replay starts
from zero whatever became of the replay before. Whoever knows that launches of several streams and
graphs never overlap lets them share a `Scratch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError, DeviceError
from smkern.ops.checks import check_kind
from smkern.ops.streams import Home
from smkern.tuning.constraints import COUNTER_BYTES

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


def check_workspace(workspace: Any, num_bytes: int, device: torch.device) -> int:
    """The address of a caller's workspace, checked.

    Args:
        workspace: A contiguous tensor of any dtype; its first `COUNTER_BYTES` must be zero at its
            first use and are zero again after each launch.
        num_bytes: What the launch needs.
        device: Where the launch runs.

    Raises:
        ArgumentError: too small, elsewhere, not contiguous or not aligned.
    """
    check_kind("workspace", workspace)
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


@dataclass(slots=True)
class _Shared:
    """A buffer that several streams use, the capture in which its counters were zeroed last, and
    whether any capture used it."""

    tensor: Tensor
    pointer: int
    zeroed_in: int | None = None
    captured: bool = False


class Scratch:
    """Workspaces of launches and graphs that never run at the same time, whatever their streams.

    Graphs keep the address that they were captured with, so what they use stays when it is
    outgrown. It grows on the stream that was current when it was made, and never in a capture,
    where a launch that needs more gets a workspace of its graph's own: run once what is to be
    captured. The counters are zeroed on the device ahead of the first launch of each capture, and
    of the first one after it.

    Args:
        device: Where buffers are made.

    Example:
        >>> scratch = Scratch(torch.device("cuda"))                            # doctest: +SKIP
        >>> for graph in graphs:                                               # doctest: +SKIP
        ...     with torch.cuda.graph(graph), scratch.on():
        ...         smkern.gemm(a, w, out=out)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._home = Home(device)
        self._held: dict[Workspaces, _Shared] = {}
        self._outgrown: list[Tensor] = []
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        held = [shared.tensor for shared in self._held.values()]
        return sum(x.nbytes for x in (*held, *self._outgrown))

    def on(self) -> AbstractContextManager[None]:
        """Inside the block, launches on the current stream find their workspaces here; no other
        thread launches there meanwhile. Nothing on a CPU."""
        if self.device.type != "cuda":
            return nullcontext()
        stream = torch.cuda.current_stream(self.device)
        return self._on(scratch_of_streams(stream.device_index), stream.cuda_stream)

    def pointer(self, owner: Workspaces, num_bytes: int, capture: int) -> int:
        """The address of an owner's workspace for the current stream; 0 where it cannot grow.

        Args:
            owner: Operators whose launches may share a workspace have one owner.
            num_bytes: Counters and partials.
            capture: The id of the current stream's capture; 0: it is in none.
        """
        with self._lock:
            held = self._held.get(owner)
            if held is None or held.tensor.nbytes < num_bytes:
                if capture:
                    return 0
                held = self._grow(owner, num_bytes)
            if held.zeroed_in != capture:
                held.tensor[:COUNTER_BYTES].zero_()
                held.zeroed_in = capture
                held.captured = held.captured or capture > 0
        return held.pointer

    def discard(self, owner: Workspaces) -> None:
        """After a launch that failed: the counters are zeroed again before the next one."""
        with self._lock:
            held = self._held.get(owner)
            if held is not None:
                held.zeroed_in = None

    @contextmanager
    def _on(self, of_streams: dict[int, Scratch], raw_stream: int) -> Iterator[None]:
        before = of_streams.get(raw_stream)
        of_streams[raw_stream] = self
        try:
            yield
        finally:
            if before is None:
                del of_streams[raw_stream]
            else:
                of_streams[raw_stream] = before

    def _grow(self, owner: Workspaces, num_bytes: int) -> _Shared:
        outgrown = self._held.pop(owner, None)
        if outgrown is not None:
            if outgrown.captured:
                self._outgrown.append(outgrown.tensor)
            elif self.device.type == "cuda":  # the current stream is the last that used it
                outgrown.tensor.record_stream(torch.cuda.current_stream(self.device))
            del outgrown
        size = _rounded(num_bytes)
        tensor = self._home.make(lambda: torch.empty(size, dtype=torch.uint8, device=self.device))
        held = self._held[owner] = _Shared(tensor, tensor.data_ptr())
        return held


@cache
def scratch_of_streams(index: int) -> dict[int, Scratch]:
    """What the raw streams of a device share at the moment: filled by `Scratch.on`."""
    return {}


class Workspaces:
    """The workspaces of one device, a stream's and a capture's apart but for what is shared.

    Args:
        device: Where buffers are made.
        capturing: Tells whether the current stream is being captured.
        capture_id: Tells the id of the capture that a raw stream is in.
        shared: What raw streams share, as `scratch_of_streams` gives it.
    """

    def __init__(
        self,
        device: torch.device,
        capturing: Callable[[], bool],
        capture_id: Callable[[int], int] = capture_id,
        shared: dict[int, Scratch] | None = None,
    ) -> None:
        self.device = device
        self._capturing = capturing
        self._capture_id = capture_id
        self._shared = {} if shared is None else shared
        self._of_streams: dict[int, Buffer] = {}
        self._of_captures: dict[int, Buffer] = {}
        self._lock = threading.Lock()

    def pointer(self, raw_stream: int, num_bytes: int) -> int:
        """The address of the current stream's workspace, grown to at least `num_bytes`.

        Args:
            raw_stream: The current stream; the buffer is allocated and zeroed on it.
            num_bytes: Counters and partials.
        """
        capturing = self._capturing()
        scratch = self._shared.get(raw_stream)
        if scratch is not None:
            capture = self._capture_id(raw_stream) if capturing else 0
            pointer = scratch.pointer(self, num_bytes, capture)
            if pointer:
                return pointer
        if capturing:
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
        scratch = self._shared.get(raw_stream)
        if scratch is not None:
            scratch.discard(self)

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
        tensor = torch.empty(_rounded(num_bytes), dtype=torch.uint8, device=self.device)
        tensor[:COUNTER_BYTES].zero_()
        return Buffer(tensor, tensor.data_ptr(), tensor.nbytes, capture)


def _rounded(num_bytes: int) -> int:
    """Bytes to allocate for a workspace of so many bytes and the counters."""
    return -(-max(num_bytes, COUNTER_BYTES) // GROWTH) * GROWTH
