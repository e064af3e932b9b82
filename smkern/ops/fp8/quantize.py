"""Matrices to e4m3 with scales: the public operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.limits import shown
from smkern.ops import checks
from smkern.ops.checks import FP8, FP8_BLOCK
from smkern.ops.fp8.rows_dispatch import bind, quant_dispatcher, scale_steps, workspace_of
from smkern.ops.fp8.rows_dispatch import problem_of as rows_problem
from smkern.ops.moe.check import results_of
from smkern.ops.operator import Bound, Operator, Shapes, call_class
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import fp8 as reference
from smkern.tuning.fp8_rows import Budget, QuantProblem

KINDS = ("tensor", "token", "block", "weight_block")


Quantize = call_class("Quantize", "Tensor x, str kind", ("out", "out_scale"))
QuantizeBy = call_class("QuantizeBy", "Tensor x, Tensor scale")


def check_quantize(call: Any) -> None:
    """Raise ArgumentError for a matrix that cannot be quantised."""
    checks.check_rows("x", call.x, 2, "[rows, columns]")
    if not (isinstance(call.kind, str) and call.kind in KINDS):
        raise ArgumentError(f"kind={shown(call.kind)}: use one of {list(KINDS)}")
    if "block" in call.kind and call.x.shape[1] % FP8_BLOCK:
        raise ArgumentError(
            f"x has {call.x.shape[1]} columns: kind={call.kind!r} wants a multiple of {FP8_BLOCK}; "
            "pad it with zeros, or use 'token'"
        )
    scale = call.out_scale
    if isinstance(scale, Tensor) and not scale.is_contiguous():
        raise ArgumentError(f"out's scales have strides {scale.stride()}: pass them without gaps")


def check_quantize_by(call: Any) -> None:
    """Raise ArgumentError for a matrix or a scale that cannot be served."""
    checks.check_rows("x", call.x, 2, "[rows, columns]")
    checks.check_kind("scale", call.scale)
    if call.scale.numel() != 1 or call.scale.dtype is not torch.float32:
        raise ArgumentError(
            f"scale has shape {list(call.scale.shape)} and is {call.scale.dtype}: pass one "
            "torch.float32 on the device"
        )


def scale_shape(shape: Any, kind: str) -> tuple[int, ...]:
    """Shape of the scales of a matrix [rows, columns]."""
    rows, columns = shape
    blocks = columns // FP8_BLOCK
    return {
        "tensor": (1,),
        "token": (rows,),
        "block": (rows, blocks),
        "weight_block": (-(-rows // FP8_BLOCK), blocks),
    }[kind]


def _shapes(call: Any) -> Shapes:
    return ((tuple(call.x.shape), FP8), (scale_shape(call.x.shape, call.kind), torch.float32))


def problem_of(call: Any, aligned: bool) -> QuantProblem | None:
    """What chooses the kernel of a checked call."""
    x = call.x
    return rows_problem("quantize", call.kind, x, x.shape[1], [call.out], aligned)


def _bind(
    dispatcher: Any, call: Any, problem: QuantProblem, budget: Budget, capturing: bool
) -> Bound:
    numbers = (*scale_steps(call.out_scale, problem), problem.rows)
    return bind(dispatcher, problem, budget, capturing, [call.x], call.out, numbers)


def problem_by(call: Any, aligned: bool) -> QuantProblem | None:
    """What chooses the kernel of a checked call."""
    x = call.x
    return rows_problem("quantize_by", "tensor", x, x.shape[1], [call.out], aligned)


def _bind_by(
    dispatcher: Any, call: Any, problem: QuantProblem, budget: Budget, capturing: bool
) -> Bound:
    return bind(dispatcher, problem, budget, capturing, [call.x], call.out, (problem.rows,))


def fill(call: Any) -> None:
    """No element: scales of groups of nothing."""
    call.out_scale.fill_(1.0)


QUANTIZE: Operator[QuantProblem] = Operator(
    name="quantize",
    call=Quantize,
    check=check_quantize,
    shapes=_shapes,
    problem=problem_of,
    reference=lambda call: reference.quantize(call.x, call.kind),
    dispatcher=quant_dispatcher,
    vectors=("x", "out"),
    workspace=workspace_of,
    prepare=_bind,
    empty=fill,
)
QUANTIZE_BY: Operator[QuantProblem] = Operator(
    name="quantize_by",
    call=QuantizeBy,
    check=check_quantize_by,
    shapes=lambda call: ((tuple(call.x.shape), FP8),),
    problem=problem_by,
    reference=lambda call: reference.quantize_by(call.x, call.scale),
    dispatcher=quant_dispatcher,
    vectors=("x", "out"),
    prepare=_bind_by,
)
LIBRARY = register(QUANTIZE, QUANTIZE_BY)
_quantize = entry(QUANTIZE)
_quantize_by = entry(QUANTIZE_BY)


def quantize(
    x: Tensor,
    kind: str,
    *,
    scale: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """x as e4m3 and the scales that give it back: x ≈ q * scale; on at most `num_sms` SMs.

    A group of elements has one scale, its largest magnitude / 448, in fp32; an element is
    x * (1 / scale) rounded to the nearest e4m3, ties to even. A group whose largest magnitude is
    below 2^-100, of zeros too, has scale 1 and zeros. A group with a value that is not finite has
    scale NaN and NaN elements: a product of it is NaN in the rows where bf16's would be, and in no
    other.

    Args:
        x: [rows, columns], bf16 or fp16 (fp32 on CPU tensors); rows may be apart, the inner stride
            is 1.
        kind: What a group is. "tensor": all of x. "token": a row, also an output channel of a
            weight. "block": 128 columns of a row. "weight_block": 128 rows (the last may be fewer)
            by 128 columns. Blocks want columns to be a multiple of 128.
        scale: With "tensor" only: one fp32 number on the device to go by instead, as
            checkpoints with static activations have it; larger values become ±448.
        out: (q, scales) to write into; q's rows may be apart, scales have no gaps. With `scale`
            given, (q, scale).
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        q [rows, columns] torch.float8_e4m3fn, and scales in fp32: [1], [rows], [rows, columns /
        128], or [ceil(rows / 128), columns / 128]. They are what `smkern.gemm` takes as `a_scale`
        or `w_scale`.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition.
        ArgumentError: what cannot be served; overlaps.
        DeviceError: the GPU is older than sm_89, which has no e4m3.
        PartitionError: the current stream's partition is closed.
        WarmupError: a graph capture met a kernel that is not loaded.

    Source: FP8 Formats for Deep Learning (arXiv 2209.05433) section 3; DeepSeek-V3 (arXiv
        2412.19437) section 3.3.2 for blocks.

    Example:
        >>> import torch, smkern
        >>> q, scale = smkern.quantize(torch.tensor([[224.0, -1.0], [0.0, 0.0]]), "token")
        >>> q.float().tolist(), scale.tolist()
        ([[448.0, -2.0], [0.0, 0.0]], [0.5, 1.0])
    """
    q, out_scale = results_of(out, "q", "scales")
    if scale is None:
        found: tuple[Tensor, Tensor] = _quantize(x, kind, q, out_scale, num_sms)
        return found
    if not (isinstance(kind, str) and kind == "tensor") or (
        out_scale is not None and out_scale is not scale
    ):
        raise ArgumentError(
            f"scale is given with kind={shown(kind)}: it serves kind='tensor' only, and is handed "
            "back as it is; leave scale at None, or out at None"
        )
    return _quantize_by(x, scale, q, num_sms), scale
