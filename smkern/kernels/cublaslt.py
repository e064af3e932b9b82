"""cuBLASLt by ctypes, as a candidate beside our kernels: the caller's workspace, an SM target.

The library is the one that torch ships. It is column-major, so row-major out [M, N] is computed as
out^T = w a^T: w is the transposed left operand, a the right one. Enum values are from cublasLt.h
(cuBLAS documentation, section "cublasLt data types").
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

from smkern.errors import ArgumentError, DeviceError
from smkern.tuning.config import Budget, GemmProblem
from smkern.tuning.constraints import COUNTER_BYTES

WORKSPACE_BYTES = 32 << 20
"""Size that NVIDIA recommends on sm_90; smkern's counters lie before it, out of its reach."""

SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
MAX_CACHED = 1024
_COMPUTE_32F = 68
_R_32F = 0
_TYPES = {"fp16": 2, "bf16": 14}
_E4M3 = 28
_TRANSA, _EPILOGUE, _BIAS_POINTER, _SM_COUNT_TARGET, _BIAS_TYPE = 3, 7, 8, 15, 26
_A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 31, 32
_SCALE_MODES = {"matrix": 0, "row": 3}  # one number; one for each row of both
_OP_T = 1
_EPILOGUE_BIAS = 4
_MAX_WORKSPACE, _ALIGN_A, _ALIGN_B, _ALIGN_C, _ALIGN_D = 1, 5, 6, 7, 8
_REDUCTIONS = 3  # CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK
_ROUND_ONCE = 3  # reduce in place or in the compute type, not in the output type


class _Algo(Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Heuristic(Structure):
    _fields_ = [
        ("algo", _Algo),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@cache
def load_library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded, else the one in torch's packages.

    Raises:
        DeviceError: neither is there.
    """
    lib = _loaded() or _packaged()
    if lib is None:
        raise DeviceError(
            f"none of {', '.join(SONAMES)} was found: install a CUDA build of torch, or leave "
            "backend at None, which then never picks cuBLAS"
        )
    for name in ("Create", "MatmulDescCreate", "MatmulDescSetAttribute", "MatrixLayoutCreate",
                 "MatmulPreferenceCreate", "MatmulPreferenceSetAttribute",
                 "MatmulAlgoGetHeuristic", "Matmul", "MatmulDescDestroy", "MatrixLayoutDestroy",
                 "MatmulPreferenceDestroy"):  # fmt: skip
        getattr(lib, f"cublasLt{name}").restype = c_int
    lib.cublasLtMatrixLayoutCreate.argtypes = [
        POINTER(c_void_p), c_int, ctypes.c_uint64, ctypes.c_uint64, c_int64,
    ]  # fmt: skip
    lib.cublasLtMatmul.argtypes = [
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p,
    ]  # fmt: skip
    return lib


def _loaded() -> ctypes.CDLL | None:
    for name in SONAMES:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    return None


def _packaged() -> ctypes.CDLL | None:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, OSError, RuntimeError):
        return None


def _check(code: int, call: str) -> None:
    if code:
        raise DeviceError(
            f"cublasLt{call} failed with status {code}: pass backend='own' to leave cuBLAS out"
        )


class _Object:
    """A handle that cuBLASLt made; destroyed with this object."""

    __slots__ = ("_destroy", "handle")

    def __init__(self, lib: ctypes.CDLL, kind: str, *args: Any) -> None:
        self.handle = c_void_p()
        self._destroy = getattr(lib, f"cublasLt{kind}Destroy")
        _check(getattr(lib, f"cublasLt{kind}Create")(byref(self.handle), *args), f"{kind}Create")

    def set(self, lib: ctypes.CDLL, kind: str, attribute: int, value: Any) -> None:
        code = getattr(lib, f"cublasLt{kind}SetAttribute")(
            self.handle, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value))
        )
        _check(code, f"{kind}SetAttribute({attribute})")

    def __del__(self) -> None:
        if self.handle:
            self._destroy(self.handle)


class _Layouts:
    """Layouts for one set of row strides, and the algorithm that the heuristics choose."""

    __slots__ = ("a", "algo", "out", "residual", "w")

    def __init__(
        self, lib: ctypes.CDLL, handle: c_void_p, desc: _Object, problem: GemmProblem,
        operands: int, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
    ) -> None:  # fmt: skip
        kind = _TYPES[problem.dtype]
        self.w = _Object(lib, "MatrixLayout", operands, problem.k, problem.n, w_stride)
        self.a = _Object(lib, "MatrixLayout", operands, problem.k, problem.m, a_stride)
        self.out = _Object(lib, "MatrixLayout", kind, problem.n, problem.m, out_stride)
        added_stride = residual_stride if problem.epilogue.residual else out_stride
        self.residual = _Object(lib, "MatrixLayout", kind, problem.n, problem.m, added_stride)
        preference = _Object(lib, "MatmulPreference")
        preference.set(lib, "MatmulPreference", _MAX_WORKSPACE, c_size_t(WORKSPACE_BYTES))
        preference.set(lib, "MatmulPreference", _REDUCTIONS, ctypes.c_uint32(_ROUND_ONCE))
        for attribute in (_ALIGN_A, _ALIGN_B, _ALIGN_C, _ALIGN_D):
            least = ctypes.c_uint32(16 if problem.aligned else 2)
            preference.set(lib, "MatmulPreference", attribute, least)
        found, count = _Heuristic(), c_int()
        code = lib.cublasLtMatmulAlgoGetHeuristic(
            handle, desc.handle, self.w.handle, self.a.handle, self.residual.handle,
            self.out.handle, preference.handle, c_int(1), byref(found), byref(count),
        )  # fmt: skip
        _check(code or found.state, "MatmulAlgoGetHeuristic")
        if not count.value:
            raise DeviceError(
                f"cuBLASLt has no algorithm for {problem.m}x{problem.n}x{problem.k} "
                f"{problem.dtype}: pass backend='own'"
            )
        self.algo = found.algo


class CublasLtPlan:
    """One problem and budget, ready to launch.

    There is one immutable descriptor for the addresses of a bias and of scales, so that threads can
    share a plan.
    """

    __slots__ = (
        "_alpha", "_beta", "_descs", "_handle", "_layouts", "_lib", "_lock", "_problem", "_scales",
        "budget", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, lib: ctypes.CDLL, handle: c_void_p, problem: GemmProblem, budget: Budget,
        scales: str | None = None,
    ) -> None:  # fmt: skip
        self._lib, self._handle, self._problem, self.budget = lib, handle, problem, budget
        self._scales = scales
        self._alpha, self._beta = c_float(1.0), c_float(problem.epilogue.residual)
        self._descs: dict[tuple[int, int, int], _Object] = {}
        self._layouts: dict[tuple[int, int, int, int], _Layouts] = {}
        self._lock = threading.Lock()
        self.workspace_bytes = COUNTER_BYTES + WORKSPACE_BYTES

    @property
    def num_ctas(self) -> int:
        """SM target given to the library, which may launch another number of CTAs."""
        return self.budget.num_sms

    def launch(
        self, a_ptr: int, w_ptr: int, out_ptr: int, bias_ptr: int, residual_ptr: int,
        a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        workspace_ptr: int, stream: int, a_scale_ptr: int = 0, w_scale_ptr: int = 0,
    ) -> None:  # fmt: skip
        """Launch on `stream`. Pointers are device addresses, strides are in elements between rows.

        Raises:
            DeviceError: the library has no algorithm, or the launch failed.
        """
        read = bias_ptr, a_scale_ptr, w_scale_ptr
        desc = self._descs.get(read) or self._desc(read)
        key = (a_stride, w_stride, out_stride, residual_stride if residual_ptr else 0)
        layouts = self._layouts.get(key) or self._layout(key, desc)
        code = self._lib.cublasLtMatmul(
            self._handle, desc.handle, ctypes.addressof(self._alpha), w_ptr, layouts.w.handle,
            a_ptr, layouts.a.handle, ctypes.addressof(self._beta), residual_ptr or out_ptr,
            layouts.residual.handle, out_ptr, layouts.out.handle, ctypes.addressof(layouts.algo),
            workspace_ptr + COUNTER_BYTES, WORKSPACE_BYTES, stream,
        )  # fmt: skip
        if code:
            _check(code, "Matmul")

    def ask(self) -> None:
        """Have the library choose for rows without gaps: what it cannot run is known before.

        Raises:
            DeviceError: it has no such scales, or no algorithm.
        """
        p, somewhere = self._problem, 1 << 20
        read = somewhere * p.epilogue.bias, somewhere, somewhere
        self._layout((p.k, p.k, p.n, p.n * p.epilogue.residual), self._made(read))

    def bind(
        self, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        static_weights: bool = False,
    ) -> Callable[[int, int, int, int, int, int, int], None]:  # fmt: skip
        """`launch` for operands with these row strides; see `GemmPlan.bind`."""

        def launch(
            a: int, w: int, out: int, bias: int, residual: int, workspace: int, stream: int
        ) -> None:
            self.launch(
                a, w, out, bias, residual, a_stride, w_stride, out_stride, residual_stride,
                workspace, stream,
            )  # fmt: skip

        return launch

    def _desc(self, read: tuple[int, int, int]) -> _Object:
        desc = self._made(read)
        with self._lock:
            if len(self._descs) >= MAX_CACHED:
                self._descs.clear()
            self._descs[read] = desc
        return desc

    def _made(self, read: tuple[int, int, int]) -> _Object:
        lib, kind = self._lib, "MatmulDesc"
        bias_ptr, a_scale_ptr, w_scale_ptr = read
        desc = _Object(lib, kind, c_int(_COMPUTE_32F), c_int(_R_32F))
        desc.set(lib, kind, _TRANSA, c_int(_OP_T))
        desc.set(lib, kind, _SM_COUNT_TARGET, c_int(self.budget.num_sms))
        if bias_ptr:
            desc.set(lib, kind, _EPILOGUE, c_int(_EPILOGUE_BIAS))
            desc.set(lib, kind, _BIAS_TYPE, c_int(_TYPES[self._problem.dtype]))
            desc.set(lib, kind, _BIAS_POINTER, c_void_p(bias_ptr))
        if self._scales is not None:  # w is the left operand
            for at, mode_at, pointer in (
                (_A_SCALE, _A_SCALE_MODE, w_scale_ptr), (_B_SCALE, _B_SCALE_MODE, a_scale_ptr),
            ):  # fmt: skip
                desc.set(lib, kind, mode_at, c_int(_SCALE_MODES[self._scales]))
                desc.set(lib, kind, at, c_void_p(pointer))
        return desc

    def _layout(self, key: tuple[int, int, int, int], desc: _Object) -> _Layouts:
        operands = _TYPES[self._problem.dtype] if self._scales is None else _E4M3
        with self._lock:
            layouts = _Layouts(self._lib, self._handle, desc, self._problem, operands, *key)
            self._layouts[key] = layouts
        return layouts


class CublasLt:
    """The library's handle on one device.

    Args:
        device_index: GPU index; torch makes its primary context current.
    """

    def __init__(self, device_index: int) -> None:
        import torch

        self._lib = load_library()
        self._handle = c_void_p()
        with torch.cuda.device(device_index):
            torch.cuda.init()
            torch.zeros(1, device=f"cuda:{device_index}")
            _check(self._lib.cublasLtCreate(byref(self._handle)), "Create")

    def plan(self, problem: GemmProblem, budget: Budget, scales: str | None = None) -> CublasLtPlan:
        """A launch of `problem` told to use `budget.num_sms` SMs (a hint to the library).

        Args:
            problem: Sizes, epilogue, and the dtype of results and, without scales, of operands.
            budget: Where it runs.
            scales: Of e4m3 operands: "matrix", one number each, or "row", one for each row of both.

        Raises:
            ArgumentError: batch_invariant, an activation, SwiGLU, or an unbound dtype.
        """
        epilogue = problem.epilogue
        if problem.batch_invariant or epilogue.swiglu or epilogue.activation:
            raise ArgumentError(
                f"cuBLASLt takes no batch_invariant={problem.batch_invariant} and no epilogue "
                f"{epilogue.key!r} here, only bias and residual: leave backend at None"
            )
        if problem.dtype not in _TYPES:
            raise ArgumentError(f"cuBLASLt is bound for {sorted(_TYPES)}, not {problem.dtype!r}")
        return CublasLtPlan(self._lib, self._handle, problem, budget, scales)


@cache
def library_of(device_index: int) -> CublasLt:
    """The one binding of a device."""
    return CublasLt(device_index)
