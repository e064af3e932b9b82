"""The plain reader of `csrc/reader.cu`, compiled when it is first needed: what SMs can read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from smkern.kernels.cuda_source import compile_cuda
from smkern.kernels.driver import check, libcuda

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
WITNESSES, STAY_NS = 512, 20_000
"""CTAs that say on which SM they are, and how long each stays there."""


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


def load_kernels(cubin: bytes, names: Iterable[str]) -> dict[str, ctypes.c_void_p]:
    """Kernels that launch on streams of any context."""
    lib = libcuda()
    library = ctypes.c_void_p()
    none, zero = ctypes.c_void_p(None), ctypes.c_uint(0)
    check(
        lib.cuLibraryLoadData(ctypes.byref(library), cubin, none, none, zero, none, none, zero),
        "cuLibraryLoadData",
    )
    kernels = {}
    for name in names:
        kernel = ctypes.c_void_p()
        check(
            lib.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode()),
            f"cuLibraryGetKernel({name})",
        )
        kernels[name] = kernel
    return kernels


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
    _kernels: dict[str, ctypes.c_void_p] = field(default_factory=dict)
    _sink: Any = None
    _arguments: Any = None
    _keep: tuple[Any, ...] = ()

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
        self._kernels = load_kernels(cubin, ("stream_read", "record_sm"))
        self._arguments, self._keep = self._reading(self.data.numel(), 1)

    def _reading(self, size: int, passes: int) -> tuple[Any, tuple[Any, ...]]:
        """Arguments that read the first `size` bytes so many times."""
        return _packed(
            ctypes.c_void_p(self.data.data_ptr()),
            ctypes.c_ulonglong(size // VECTOR_BYTES),
            ctypes.c_void_p(self._sink.data_ptr()),
            ctypes.c_uint(0),
            ctypes.c_uint(passes),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes a launch reads."""
        return int(self.data.numel())

    def tbps(self, us: float) -> float:
        """Bandwidth of a read that took `us` microseconds, TB/s."""
        return self.num_bytes / us / 1e6

    def launch(self, num_sms: int, raw_stream: int) -> None:
        """Enqueue one read of the whole buffer by `num_sms` SMs' worth of CTAs."""
        grid, block = num_sms * self.shape.ctas_per_sm, self.shape.threads
        _launch(self._kernels["stream_read"], grid, block, raw_stream, self._arguments)

    def l2_bytes(self, num_sms: int) -> int:
        """Bytes that `launch_l2` reads."""
        size, passes = l2_reading(self.shape, num_sms)
        return size * passes

    def launch_l2(self, num_sms: int, raw_stream: int) -> None:
        """Enqueue reads of a few MB over and over by `num_sms` SMs' worth of CTAs."""
        grid, block = num_sms * self.shape.ctas_per_sm, self.shape.threads
        arguments, _keep = self._reading(*l2_reading(self.shape, num_sms))
        _launch(self._kernels["stream_read"], grid, block, raw_stream, arguments)

    def sms_of(self, stream: Any) -> tuple[int, ...]:
        """The ids of the SMs that a stream's work reaches, in order."""
        import torch

        where = torch.device("cuda", self.device)
        out = torch.full((WITNESSES,), -1, dtype=torch.int32, device=where)
        torch.cuda.synchronize(self.device)
        arguments, _keep = _packed(ctypes.c_void_p(out.data_ptr()), ctypes.c_ulonglong(STAY_NS))
        _launch(self._kernels["record_sm"], WITNESSES, 32, stream.cuda_stream, arguments)
        torch.cuda.synchronize(self.device)
        return tuple(sorted(set(out.tolist())))


def _packed(*values: Any) -> tuple[Any, tuple[Any, ...]]:
    """Kernel arguments as the driver takes them, and what must outlive them."""
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    return pointers, values


def _launch(
    kernel: ctypes.c_void_p, grid: int, block: int, raw_stream: int, arguments: Any
) -> None:
    one, uint = ctypes.c_uint(1), ctypes.c_uint
    code = libcuda().cuLaunchKernel(
        kernel, uint(grid), one, one, uint(block), one, one, uint(0),
        ctypes.c_void_p(raw_stream), arguments, ctypes.c_void_p(None),
    )  # fmt: skip
    check(code, f"cuLaunchKernel({grid} CTAs of {block} threads)")
