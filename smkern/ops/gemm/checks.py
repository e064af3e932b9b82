"""What matrices and options of a GEMM must satisfy: value, limit and remedy in every message."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.checks import FP8, MAX_SIZE, check_choice, check_kind, check_steps, dtype_name
from smkern.tuning.config import Activation, Kernel

ACTIVATIONS = get_args(Activation)
BACKENDS = (*get_args(Kernel), "own", "model")
"""`backend=` choices: one kernel; "own" (no cuBLAS); "model" (no tuned table)."""


def check_choices(activation: Any, backend: Any) -> None:
    """Raise ArgumentError for an activation or a backend that does not exist."""
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("backend", backend, BACKENDS)


def check_matrix(name: str, x: Any, rows: int | None = None, cols: int | None = None) -> None:
    """Raise ArgumentError unless x is a strided [rows, cols] tensor with inner stride 1."""
    check_kind(name, x)
    if x.dim() != 2:
        raise ArgumentError(
            f"{name} has shape {list(x.shape)}: a matrix of two dimensions is wanted; flatten "
            "leading dimensions first"
        )
    if (rows is not None and x.shape[0] != rows) or (cols is not None and x.shape[1] != cols):
        wanted = ["any" if size is None else str(size) for size in (rows, cols)]
        raise ArgumentError(
            f"{name} has shape {list(x.shape)}, wanted [{', '.join(wanted)}] "
            "(a [M, K], w [N, K], bias [N], residual and out [M, N])"
        )
    if max(x.shape) > MAX_SIZE:
        raise ArgumentError(f"{name} has shape {list(x.shape)}, the largest size is {MAX_SIZE}")
    if x.shape[1] > 1 and x.stride(1) != 1 and x.numel() > 0:
        raise ArgumentError(
            f"{name} has strides {x.stride()}: the inner stride must be 1 (row-major, rows may be "
            f"apart); call {name}.contiguous()"
        )
    check_steps(name, x)


def check_product(call: Any) -> None:
    """Raise ArgumentError for a GEMM whose options or sizes cannot be."""
    check_choices(call.activation, call.backend)
    check_matrix("a", call.a)
    m, k = call.a.shape
    check_matrix("w", call.w, None, k)
    n = call.w.shape[0]
    for name, x in (("residual", call.residual), ("out", call.out)):
        if x is not None:
            check_matrix(name, x, m, n)
    if call.bias is not None:
        check_bias(call.bias, n)


def check_gated_product(call: Any) -> None:
    """Raise ArgumentError for a GEMM with SwiGLU whose options or sizes cannot be."""
    w = call.w_gate_up
    check_choices(None, call.backend)
    check_matrix("a", call.a)
    check_matrix("w_gate_up", w, None, call.a.shape[1])
    if w.shape[0] % 2:
        raise ArgumentError(
            f"w_gate_up has {w.shape[0]} rows, wanted an even number: the gate's I rows, then up's "
            "I; join both projections, torch.cat([w_gate, w_up])"
        )


def check_bias(bias: Any, n: int) -> None:
    """Raise ArgumentError unless bias is a dense vector [n]."""
    check_kind("bias", bias)
    if bias.shape != (n,):
        raise ArgumentError(f"bias has shape {list(bias.shape)}, wanted [{n}], w's rows")
    if n > 1 and bias.stride(0) != 1:
        raise ArgumentError(f"bias has stride {bias.stride(0)}, wanted 1: call bias.contiguous()")


def check_dtypes(a: Tensor, others: dict[str, Tensor | None]) -> None:
    """Raise ArgumentError unless every tensor has a's dtype."""
    if a.dtype is FP8:
        raise ArgumentError(f"a is {FP8} and has no scales: pass a_scale and w_scale")
    dtype_name(a.dtype)
    for name, x in others.items():
        if x is not None and x.dtype is not a.dtype:
            raise ArgumentError(f"{name} is {x.dtype}, a is {a.dtype}: convert {name} to {a.dtype}")
