"""The driver calls of a launch, through ctypes on raw buffers: 1 to 2 us each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from smkern.errors import DeviceError

if TYPE_CHECKING:
    from smkern.device import Budget

TENSOR_MAP_BYTES = 128
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ANYWHERE = 1 << 20  # an aligned address, replaced before any launch
_DATA_TYPES = {"e4m3": 0, "fp16": 6, "fp32": 7, "bf16": 9}  # CUtensorMapDataType


@cache
def libcuda() -> ctypes.CDLL:
    """The driver's library; `DeviceError` where there is none."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no CUDA driver on this machine ({error}); kernels need one") from error
    return lib


def check(code: int, call: str) -> None:
    """Raise `DeviceError` with the driver's message unless `code` is success."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    libcuda().cuGetErrorString(code, ctypes.byref(text))
    raise DeviceError(f"{call} failed with {code}: {(text.value or b'unknown').decode()}")


def load_function(cubin: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    """Load device code into the current (primary) context and return its function."""
    lib = libcuda()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(lib.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    check(
        lib.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
        f"cuModuleGetFunction({name})",
    )
    check(
        lib.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
        f"cuFuncSetAttribute(shared memory, {shared_bytes} bytes)",
    )
    return function


@cache
def copy_async() -> Any:
    """`cuMemcpyAsync(to, from, bytes, stream)` on addresses; returns the driver's code.

    Torch's copy takes several times as long to call, and remembers the stream in a pinned block:
    freeing the block records an event on that stream, which aborts the process once its partition
    is closed. Callers must keep both buffers alive until the copy has finished.
    """
    pointer = ctypes.c_void_p
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_size_t, pointer)
    return prototype(("cuMemcpyAsync", libcuda()))


@cache
def launch_kernel() -> Any:
    """`cuLaunchKernel`; releases the GIL, as it may block on a full queue."""
    uint, pointer = ctypes.c_uint32, ctypes.c_void_p
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *[uint] * 7, pointer, pointer, pointer)
    return prototype(("cuLaunchKernel", libcuda()))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes, used as an int here."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("value", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 60),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

OVERLAP_FROM = 90
"""The first capability whose launches can overlap; kernels for older ones do not wait."""


def may_overlap(wanted: bool, budget: Budget, capability: int) -> bool:
    """Whether a launch may begin before the previous kernel has ended, if `wanted`.

    Without a mask, two overlapping launches would use more SMs than the budget.
    """
    return wanted and budget.confined == "mask" and capability >= OVERLAP_FROM


Run = Callable[[int, Any], int]
"""run(stream, params) → the driver's code; `params` are the addresses of the parameters."""


def launcher(
    function: ctypes.c_void_p, num_ctas: int, threads: int, shared_bytes: int, *, overlap: bool
) -> Run:
    """The launch of a one-dimensional grid.

    With `overlap` the grid may start while the previous kernel on the stream still runs
    (programmatic dependent launch); the kernel itself waits before it reads that one's results.
    Such a launch stores the stream in a structure of its own, so callers must hold a lock.
    """
    address = function.value
    if not overlap:
        run = launch_kernel()

        def plain(stream: int, params: Any) -> int:
            code: int = run(
                address, num_ctas, 1, 1, threads, 1, 1, shared_bytes, stream, params, None
            )
            return code

        return plain
    attribute = _Attribute(id=_PROGRAMMATIC, value=1)
    config = _LaunchConfig(
        (num_ctas, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(attribute), 1
    )
    run_ex, at = _launch_kernel_ex(), ctypes.byref(config)

    def overlapping(stream: int, params: Any) -> int:
        config.stream = stream
        code: int = run_ex(at, address, params, None)
        return code

    return overlapping


@cache
def _launch_kernel_ex() -> Any:
    """`cuLaunchKernelEx`, which releases the GIL too."""
    pointer = ctypes.c_void_p
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)
    return prototype(("cuLaunchKernelEx", libcuda()))


@cache
def replace_address() -> Any:
    """`cuTensorMapReplaceAddress`: moves a map to another 16-byte aligned address."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(("cuTensorMapReplaceAddress", libcuda()))


def encode_tensor_map(
    address: int,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> None:
    """Write an operand's tensor map to `address`; `replace_address` sets the operand's address.

    The operand has `dims` elements, innermost first, with `strides` in bytes (multiples of 16) for
    all dimensions but the first; a copy brings `box` elements into shared memory with `swizzle`.
    """
    int32, uint32, uint64, rank = ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64, len(dims)
    # data type, rank, base | dims, strides, box, element strides | interleave, swizzle, L2
    # promotion (256 bytes), out-of-bounds fill (zeros)
    code = libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), int32(_DATA_TYPES[dtype]), int32(rank),
        ctypes.c_void_p(_ANYWHERE), (uint64 * rank)(*dims), (uint64 * (rank - 1))(*strides),
        (uint32 * rank)(*box), (uint32 * rank)(*[1] * rank), int32(0), int32(swizzle), int32(3),
        int32(0),
    )  # fmt: skip
    check(code, f"cuTensorMapEncodeTiled({dims} {dtype}, {strides} bytes apart, boxes of {box})")
