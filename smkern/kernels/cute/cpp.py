"""CUTLASS's C++ GEMMs of `csrc/cutlass_gemm.cu` by ctypes: an oracle and a yardstick.

Dispatch never takes them. A launch encodes its tensor maps anew (some 3 us on the host).
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from typing import Any

from smkern.errors import ArgumentError, BudgetError, DeviceError
from smkern.kernels.cute.cpp_build import load_library

ALIGN = 8
"""Elements of 16 bytes, of which the tensor maps ask multiples."""
SWIZZLES = (1, 2, 4, 8)
"""Rows or columns of tiles that CTAs walk together."""
_MOST = 2**31 - 1


class Call(ctypes.Structure):
    """`Call` of the source: addresses, sizes, elements between rows, the schedule."""

    _fields_ = (
        ("a", c_void_p), ("w", c_void_p), ("out", c_void_p),
        ("m", c_int), ("n", c_int), ("k", c_int),
        ("a_stride", c_longlong), ("w_stride", c_longlong), ("out_stride", c_longlong),
        ("sm_count", c_int), ("max_active_clusters", c_int), ("swizzle", c_int),
        ("workspace", c_void_p), ("stream", c_void_p),
    )  # fmt: skip


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "count": (c_int, ()),
    "name": (c_char_p, (c_int,)),
    "cluster_size": (c_int, (c_int,)),
    "clusters": (c_int, (c_int, c_void_p, ctypes.POINTER(c_int))),
    "ctas": (c_int, (c_int, ctypes.POINTER(Call))),
    "workspace_bytes": (c_longlong, (c_int, ctypes.POINTER(Call))),
    "run": (c_int, (c_int, ctypes.POINTER(Call))),
    "error": (c_char_p, (c_int,)),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled kernel: `rows x columns x K:schedule:cluster`, `swap` where w has the rows."""

    index: int
    name: str
    cluster_size: int

    @property
    def rows(self) -> int:
        """Rows of `a` that a tile holds."""
        x, y, _ = self.name.partition(":")[0].split("x")
        return int(y if self.name.endswith(":swap") else x)


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of one variant on one stream, ready to be repeated; its tensors must outlive it."""

    gemm: CutlassGemm
    variant: Variant
    call: Call
    num_ctas: int

    def __call__(self) -> None:
        """Launch.

        Raises:
            DeviceError: CUTLASS or the runtime refuses it.
        """
        status = self.gemm.functions["run"](self.variant.index, self.call)
        if status:
            self.gemm.refuse(status, self.variant)


class CutlassGemm:
    """The kernels of a library that `smkern build --cpp` made.

    Example:
        >>> from smkern.kernels.cute.cpp import load
        >>> gemm = load()  # doctest: +SKIP
        >>> launch = gemm.prepare(
        ...     gemm.variants[0], (a.data_ptr(), w.data_ptr(), out.data_ptr()), (m, n, k),
        ...     (k, k, n), num_sms=partition.num_sms, stream=partition.raw_stream,
        ... )  # doctest: +SKIP
        >>> launch()  # doctest: +SKIP
    """

    def __init__(self, lib: Any) -> None:
        self.functions: dict[str, Any] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, f"smkern_cutlass_{name}")
            function.restype, function.argtypes = result, arguments
            self.functions[name] = function
        of = self.functions
        self.variants = tuple(
            Variant(i, of["name"](i).decode(), of["cluster_size"](i)) for i in range(of["count"]())
        )

    def clusters(self, variant: Variant, stream: int) -> int:
        """How many of a variant's clusters run at once on the SMs of a stream.

        Raises:
            DeviceError: the runtime cannot tell.
        """
        found = c_int()
        if status := self.functions["clusters"](variant.index, stream, ctypes.byref(found)):
            self.refuse(status, variant)
        return found.value

    def prepare(
        self, variant: Variant, addresses: tuple[int, int, int], sizes: tuple[int, int, int],
        strides: tuple[int, int, int], *, num_sms: int, stream: int, swizzle: int = 1,
    ) -> Launch:  # fmt: skip
        """A launch of out[m, n] = a[m, k] w[n, k]^T in bf16 on at most `num_sms` SMs.

        Args:
            variant: one of `variants`.
            addresses: of a, w and out, on the device, multiples of 16.
            sizes: m, n and k; n and k are multiples of 8.
            strides: elements between rows of a, w and out, multiples of 8.
            num_sms: the most CTAs; every one has an SM to itself.
            stream: the address of the stream.
            swizzle: one of `SWIZZLES`.

        Raises:
            ArgumentError: an address, size, stride or swizzle that the kernels cannot serve.
            BudgetError: `num_sms` is below a cluster's, or no cluster fits the stream's SMs.
            DeviceError: CUTLASS asks for a workspace, or the runtime cannot tell what fits.
        """
        _check(addresses, sizes, strides, swizzle)
        size = variant.cluster_size
        fit = min(self.clusters(variant, stream), num_sms // size) if num_sms > 0 else 0
        if fit < 1:
            raise BudgetError(
                f"no cluster of {size} of {variant.name} fits {num_sms} SMs of this stream; "
                f"take one of {', '.join(v.name for v in self.variants if v.cluster_size < size)}"
                if size > 1
                else f"num_sms is {num_sms}, or the stream has none free; give at least 1"
            )
        call = Call(*addresses, *sizes, *strides, num_sms, fit, swizzle, None, stream)
        if need := self.functions["workspace_bytes"](variant.index, call):
            raise DeviceError(f"{variant.name} asks for a workspace of {need} bytes; none is made")
        return Launch(self, variant, call, self.functions["ctas"](variant.index, call))

    def refuse(self, status: int, variant: Variant) -> None:
        """Raise DeviceError for a status that is not 0."""
        text = self.functions["error"](status).decode()
        raise DeviceError(f"CUTLASS's {variant.name} failed with {status}: {text}")


def load() -> CutlassGemm:
    """The kernels, of the library as kept in smkern's cache.

    Raises:
        DeviceError: it was not built, or does not load.
    """
    return CutlassGemm(load_library())


def _check(
    addresses: tuple[int, int, int], sizes: tuple[int, int, int], strides: tuple[int, int, int],
    swizzle: int,
) -> None:  # fmt: skip
    m, n, k = sizes
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not 0 < size <= _MOST:
            raise ArgumentError(f"{name} is {size}; give 1 to {_MOST}")
    rows = {"n": n, "k": k} | dict(
        zip(("a_stride", "w_stride", "out_stride"), strides, strict=True)
    )
    for name, value in rows.items():
        if value % ALIGN:
            raise ArgumentError(f"{name} is {value}, no multiple of {ALIGN}; pad the rows")
    for name, stride, least in zip(("a", "w", "out"), strides, (k, k, n), strict=True):
        if stride < least:
            raise ArgumentError(f"{name}'s rows are {stride} apart and hold {least} elements")
    for name, address in zip(("a", "w", "out"), addresses, strict=True):
        if address <= 0 or address % 16:
            raise ArgumentError(f"{name} lies at {address:#x}, no multiple of 16 bytes; copy it")
    if swizzle not in SWIZZLES:
        raise ArgumentError(f"swizzle is {swizzle}; give one of {SWIZZLES}")
