"""The few driver calls of a launch, by ctypes on raw buffers: a call costs 1 to 2 us."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from smkern.errors import DeviceError

TENSOR_MAP_BYTES = 128
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DATA_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}  # CUtensorMapDataType


@cache
def libcuda() -> ctypes.CDLL:
    """The driver's library; `DeviceError` where there is none."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no CUDA driver on this machine ({error}); kernels need one") from error
    return lib


def check(code: int, call: str) -> None:
    """Raise `DeviceError` with the driver's own words unless `code` is success."""
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


class TensorMap:
    """Encodes one operand's tensor map in place, only when the operand changed.

    The operand is [rows, k] with rows `stride` elements apart; a copy brings a box of
    `box` = (rows, k) elements into shared memory with `swizzle`.
    """

    __slots__ = ("_args", "_dims", "_encode", "_stride", "address", "key")

    def __init__(
        self, address: int, dtype: str, rows: int, k: int, box: tuple[int, int], swizzle: int
    ) -> None:
        self.address = address
        self.key: tuple[int, int] | None = None
        self._dims = (ctypes.c_uint64 * 2)(k, rows)
        self._stride = (ctypes.c_uint64 * 1)(0)
        self._encode: Any = libcuda().cuTensorMapEncodeTiled
        box_kx = (ctypes.c_uint32 * 2)(box[1], box[0])
        unit = (ctypes.c_uint32 * 2)(1, 1)
        int32 = ctypes.c_int32
        # data type, rank | base | dims, strides, box, element strides, interleave, swizzle,
        # L2 promotion (256 bytes), out-of-bounds fill (zeros)
        head = (ctypes.c_void_p(address), int32(_DATA_TYPES[dtype]), int32(2))
        tail = (
            self._dims, self._stride, box_kx, unit, int32(0), int32(swizzle), int32(3), int32(0),
        )  # fmt: skip
        self._args = (head, tail)

    def encode(self, pointer: int, stride_bytes: int) -> None:
        """Write the map of the operand at `pointer`; CUDA requires 16-byte multiples."""
        head, tail = self._args
        self._stride[0] = stride_bytes
        code = self._encode(*head, ctypes.c_void_p(pointer), *tail)
        if code:
            self.key = None
            check(code, f"cuTensorMapEncodeTiled(base {pointer:#x}, row of {stride_bytes} bytes)")
        self.key = (pointer, stride_bytes)
