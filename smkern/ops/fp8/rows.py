"""Operators over rows that write e4m3: norms and SiLU times up, each with its scales.

They are behind `out_scale=` of `smkern.rms_norm`, `add_rms_norm` and `silu_and_mul`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.checks import FP8, FP8_BLOCK
from smkern.ops.fp8.rows_dispatch import bind, quant_dispatcher, scale_steps
from smkern.ops.fp8.rows_dispatch import problem_of as rows_problem
from smkern.ops.fp8.scales import check_block_scale
from smkern.ops.operator import Bound, Operator, Shapes, call_class
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import fp8 as reference
from smkern.ops.reference import rows as rows_reference
from smkern.ops.rows.call import check_norm, check_silu
from smkern.tuning.fp8_rows import Budget, Group, QuantOp, QuantProblem

ScaledRmsNorm = call_class(
    "ScaledRmsNorm", "Tensor x, Tensor weight, Tensor(a!) out_scale, *, float eps=1e-06"
)
ScaledAddRmsNorm = call_class(
    "ScaledAddRmsNorm",
    "Tensor x, Tensor(a!) residual, Tensor weight, Tensor(b!) out_scale, *, float eps=1e-06",
)
ScaledSiluAndMul = call_class("ScaledSiluAndMul", "Tensor x, Tensor(a!) out_scale")


def check_scaled(call: Any) -> None:
    """Raise ArgumentError for a call that cannot be served."""
    (check_silu if isinstance(call, ScaledSiluAndMul) else check_norm)(call)
    check_out_scale(call.out_scale, *shape_of(call))


def check_out_scale(scale: Any, rows: int, width: int) -> None:
    """Raise ArgumentError unless it takes scales of rows, or of 128 columns of them."""
    checks.check_kind("out_scale", scale)
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"out_scale is {scale.dtype}, wanted torch.float32")
    if scale.dim() == 2:
        if width % FP8_BLOCK:
            raise ArgumentError(
                f"out_scale has shape {list(scale.shape)}, a scale for {FP8_BLOCK} columns, and "
                f"the result has {width}: pass [{rows}], a scale a row"
            )
        check_block_scale("out_scale", scale, rows, width)
    elif tuple(scale.shape) != (rows,) or (rows > 1 and scale.stride(0) != 1):
        raise ArgumentError(
            f"out_scale has shape {list(scale.shape)} and strides {scale.stride()}, wanted "
            f"[{rows}] without gaps, a scale a row, or [{rows}, {width // FP8_BLOCK}], one for "
            f"{FP8_BLOCK} columns"
        )


def group_of(out_scale: Tensor) -> Group:
    """What shares a scale, by the checked tensor that takes them."""
    return "block" if out_scale.dim() == 2 else "token"


def shape_of(call: Any) -> tuple[int, int]:
    """Rows and columns of a call's result."""
    rows, columns = call.x.shape
    return rows, columns // 2 if isinstance(call, ScaledSiluAndMul) else columns


def shapes_of(call: Any) -> Shapes:
    """Shape and dtype of a checked call's result."""
    return ((shape_of(call), FP8),)


def by_reference(call: Any) -> Tensor:
    """The reference on a checked call; its scales are written."""
    if isinstance(call, ScaledRmsNorm):
        found = rows_reference.rms_norm(call.x, call.weight, float(call.eps))
    elif isinstance(call, ScaledAddRmsNorm):
        found = rows_reference.add_rms_norm(call.x, call.residual, call.weight, float(call.eps))
    else:
        found = rows_reference.silu_and_mul(call.x)
    q, scale = reference.quantize(found, group_of(call.out_scale))
    call.out_scale.copy_(scale)
    return q


def problem_of(call: Any, aligned: bool) -> QuantProblem | None:
    """What chooses the kernel of a checked call."""
    weight, residual = (getattr(call, name, None) for name in ("weight", "residual"))
    norm: QuantOp = "rms_norm" if residual is None else "add_rms_norm"
    op: QuantOp = "silu_and_mul" if weight is None else norm
    group, width = group_of(call.out_scale), shape_of(call)[1]
    return rows_problem(op, group, call.x, width, [residual, call.out], aligned, weight)


def _bind(
    dispatcher: Any, call: Any, problem: QuantProblem, budget: Budget, capturing: bool
) -> Bound:
    read = [call.x, call.residual] if isinstance(call, ScaledAddRmsNorm) else [call.x]
    numbers: tuple[Any, ...] = (*scale_steps(call.out_scale, problem), problem.rows)
    if not isinstance(call, ScaledSiluAndMul):
        numbers += (float(call.eps),)
    return bind(dispatcher, problem, budget, capturing, read, call.out, numbers)


_scaled = partial(
    Operator,
    check=check_scaled,
    shapes=shapes_of,
    problem=problem_of,
    reference=by_reference,
    dispatcher=quant_dispatcher,
    prepare=_bind,
)
SCALED_RMS_NORM: Operator[QuantProblem] = _scaled(
    name="scaled_rms_norm", call=ScaledRmsNorm, vectors=("x", "weight", "out")
)
SCALED_ADD_RMS_NORM: Operator[QuantProblem] = _scaled(
    name="scaled_add_rms_norm", call=ScaledAddRmsNorm, vectors=("x", "residual", "weight", "out")
)
SCALED_SILU_AND_MUL: Operator[QuantProblem] = _scaled(
    name="scaled_silu_and_mul", call=ScaledSiluAndMul, vectors=("x", "out")
)
LIBRARY = register(SCALED_RMS_NORM, SCALED_ADD_RMS_NORM, SCALED_SILU_AND_MUL)
scaled_rms_norm = entry(SCALED_RMS_NORM)
scaled_add_rms_norm = entry(SCALED_ADD_RMS_NORM)
scaled_silu_and_mul = entry(SCALED_SILU_AND_MUL)
