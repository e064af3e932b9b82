"""The plain reader of `csrc/reader.cu`, compiled when it is first needed: what SMs can read."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from smkern.kernels.cuda_source import compile_cuda
from smkern.kernels.driver import check, launch_kernel, load_function

SOURCE = "reader.cu"
VECTOR_BYTES = 16
L2_MULTIPLE = 16
"""The buffer over the L2: read in a circle, under 1/16 of it can still be there."""
MIN_BUFFER_BYTES = 1 << 30
"""A read of it takes 0.2 ms or more, of which a launch's ramps are 1%."""
L2_BYTES = 12 << 20
"""What is read again and again to measure L2, at most: its halves may hold a copy each."""
L2_READ_BYTES = 512 << 20
"""What a launch reads from L2 in all, about."""


@dataclass(frozen=True, slots=True)
class ReaderShape:
    """How the reader keeps bytes in flight: CTAs an SM, threads a CTA, loads a turn and thread."""

    threads: int
    ctas_per_sm: int
    loads: int

    @property
    def name(self) -> str:
        return f"{self.ctas_per_sm}x{self.threads}x{self.loads}"

    @property
    def defines(self) -> tuple[str, ...]:
        sizes = {"THREADS": self.threads, "CTAS_PER_SM": self.ctas_per_sm, "LOADS": self.loads}
        return tuple(f"{name}={value}" for name, value in sizes.items())


SHAPES = (ReaderShape(1024, 2, 8), ReaderShape(1024, 1, 8), ReaderShape(1024, 1, 12))
"""2,048 threads with 32 registers each, or 1,024 with 64, which hold 8 or 12 loads at once."""


def buffer_bytes(l2_bytes: int) -> int:
    """Size of the buffer that is read, a multiple of 16."""
    wanted = max(MIN_BUFFER_BYTES, L2_MULTIPLE * l2_bytes)
    return wanted // VECTOR_BYTES * VECTOR_BYTES


def l2_reading(shape: ReaderShape, num_sms: int) -> tuple[int, int]:
    """(bytes, passes) that measure L2: whole turns of the grid, so that no thread loads alone."""
    turn = num_sms * shape.ctas_per_sm * shape.threads * shape.loads * VECTOR_BYTES
    size = turn * max(1, L2_BYTES // turn)
    return size, max(1, L2_READ_BYTES // size)


def compile_reader(shape: ReaderShape, capability: tuple[int, int]) -> bytes:
    """The reader as a cubin, from this user's cache where it is there.

    Raises:
        DeviceError: no compiler is there, or the source does not compile; with what each said.
    """
    return compile_cuda(SOURCE, shape.defines, f"sm_{capability[0]}{capability[1]}")


@dataclass(slots=True)
class Reader:
    """Reads a buffer of a GPU once a launch, from as many SMs as its stream's partition has.

    Args:
        device: index of the GPU; its primary context is torch's.
        shape: threads and loads.
        data: the buffer, uint8 on the device; made where not given. Readers may share it.
    """

    device: int = 0
    shape: ReaderShape = SHAPES[0]
    data: Any = None
    _function: Any = field(init=False)
    _sink: Any = field(init=False)

    def __post_init__(self) -> None:
        import torch

        from smkern.device import device_info

        info = device_info(self.device)
        where = torch.device("cuda", self.device)
        if self.data is None:
            size = buffer_bytes(info.l2_bytes)
            self.data = torch.full((size,), 1, dtype=torch.uint8, device=where)
        self._sink = torch.zeros(1, dtype=torch.int32, device=where)
        torch.cuda.synchronize(self.device)
        cubin = compile_reader(self.shape, info.capability)
        with torch.cuda.device(where):
            self._function = load_function(cubin, "stream_read", 0)

    @property
    def num_bytes(self) -> int:
        """Bytes a launch reads."""
        return int(self.data.numel())

    def tbps(self, us: float) -> float:
        """Bandwidth of a read that took `us` microseconds, TB/s."""
        return self.num_bytes / us / 1e6

    def launch(self, num_sms: int, raw_stream: int) -> None:
        """Enqueue one read of the whole buffer by `num_sms` SMs' worth of CTAs."""
        self._read(num_sms, raw_stream, self.num_bytes, 1)

    def l2_bytes(self, num_sms: int) -> int:
        """Bytes that `launch_l2` reads."""
        size, passes = l2_reading(self.shape, num_sms)
        return size * passes

    def launch_l2(self, num_sms: int, raw_stream: int) -> None:
        """Enqueue reads of a few MB over and over by `num_sms` SMs' worth of CTAs."""
        self._read(num_sms, raw_stream, *l2_reading(self.shape, num_sms))

    def _read(self, num_sms: int, raw_stream: int, size: int, passes: int) -> None:
        """Enqueue reads of the first `size` bytes so many times."""
        values = (
            ctypes.c_void_p(self.data.data_ptr()),
            ctypes.c_ulonglong(size // VECTOR_BYTES),
            ctypes.c_void_p(self._sink.data_ptr()),
            ctypes.c_uint(0),
            ctypes.c_uint(passes),
        )
        params = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        grid, block = num_sms * self.shape.ctas_per_sm, self.shape.threads
        code = launch_kernel()(self._function, grid, 1, 1, block, 1, 1, 0, raw_stream, params, None)
        check(code, f"cuLaunchKernel({grid} CTAs of {block} threads)")
