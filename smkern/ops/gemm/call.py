"""Calls of GEMMs: what they were given, what must hold, and the launch that follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.aliasing import VECTOR_BYTES
from smkern.ops.checks import dtype_name
from smkern.ops.gemm.checks import check_dtypes, check_product
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.ops.operator import Bound, Shapes, call_class
from smkern.tuning.config import Budget, Epilogue, GemmProblem

LAUNCHED = ("a", "w", "out", "bias", "residual", "workspace", "stream")
"""What the launch of a GEMM takes, in order."""


Gemm = call_class(
    "Gemm",
    "Tensor a, Tensor w, *, Tensor? bias=None, Tensor? residual=None, str? activation=None, "
    "bool batch_invariant=False, str? backend=None, bool static_weights=False",
    workspace=True,
)


def check_gemm(call: Any) -> None:
    """Raise ArgumentError for a GEMM that cannot be served."""
    check_product(call)
    check_dtypes(call.a, {x: getattr(call, x) for x in ("w", "bias", "residual", "out")})


def shapes_of(call: Any) -> Shapes:
    """Shape and dtype of a checked call's result."""
    return (((call.a.shape[0], call.w.shape[0]), call.a.dtype),)


def problem_of(call: Any, aligned: bool) -> GemmProblem | None:
    """What chooses the kernel of a checked call; None where nothing is multiplied.

    Raises:
        ArgumentError: fp32 matrices, which only the reference takes.
    """
    epilogue = Epilogue(call.bias is not None, call.residual is not None, call.activation)
    matrices = [call.a, call.w, call.out, call.residual]
    return problem_from(call, epilogue, matrices, aligned)


def problem_from(
    call: Any, epilogue: Epilogue, matrices: list[Tensor | None], aligned: bool
) -> GemmProblem | None:
    """The problem of a call whose first two arguments are a and weights.

    Args:
        call: A checked call of a GEMM.
        epilogue: What is done to the product.
        matrices: All matrices of the call.
        aligned: Whether they and the bias begin at whole 16 bytes.
    """
    a, w = call[:2]
    (m, k), n = a.shape, w.shape[0]
    if a.dtype is torch.float32:
        raise ArgumentError("dtype torch.float32 on a GPU: use torch.bfloat16 or torch.float16")
    if not (m and n and k):
        return None
    problem = GemmProblem(m, n, k, dtype_name(a.dtype), epilogue, False, bool(call.batch_invariant))
    whole = aligned and rows_aligned(problem.out_columns, k, matrices)
    return replace(problem, aligned=whole)


def bind(
    dispatcher: Dispatcher, call: Any, problem: GemmProblem, budget: Budget, capturing: bool
) -> Bound:
    """The launch of a call of `gemm` or `gemm_swiglu`."""
    plan = dispatcher.plan(problem, budget, call.backend, capturing=capturing)
    launch = plan.bind(
        row_stride(call[0]),
        row_stride(call[1]),
        problem.out_columns if call.out is None else row_stride(call.out),
        row_stride(getattr(call, "residual", None)),
        static_weights=bool(call.static_weights),
    )
    return Bound(launch, workspace_bytes=plan.workspace_bytes)


def row_stride(x: Tensor | None) -> int:
    """Elements between rows; a single row gets a pitch that is as good as aligned.

    A matrix of one row may carry any row stride, and no kernel steps by it.
    """
    if x is None:
        return 0
    rows, cols = x.shape
    if rows > 1:
        return int(x.stride(0))
    return -(-cols // VECTOR_BYTES) * VECTOR_BYTES


def rows_aligned(n: int, k: int, tensors: list[Tensor | None]) -> bool:
    """Whether rows come in whole 16-byte pieces: widths n and k, and every matrix's row pitch.

    Base addresses are left to the caller, who knows them.
    """
    if n * 2 % VECTOR_BYTES or k * 2 % VECTOR_BYTES:
        return False
    for x in tensors:
        if x is None:
            continue
        stride = row_stride(x)
        if (stride * x.element_size()) % VECTOR_BYTES or stride < x.shape[1]:
            return False
    return True
