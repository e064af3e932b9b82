"""Grouped GEMM of e4m3 matrices: the operator behind `smkern.grouped_gemm(a_scale=, w_scale=)`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.limits import check_fp8_capability
from smkern.ops import checks
from smkern.ops.checks import FP8_BLOCK, dtype_name
from smkern.ops.fp8.call import ScaledGrouped, check_out_dtype, out_dtype_of
from smkern.ops.fp8.call import given_scales as given_scales
from smkern.ops.fp8.scales import (
    block_steps,
    check_e4m3,
    check_scale_pair,
    check_values,
    kind_of,
    row_step,
)
from smkern.ops.gemm.call import row_stride
from smkern.ops.gemm.checks import check_matrix
from smkern.ops.moe.check import check_expert_weights, check_offsets
from smkern.ops.operator import Operator, Shapes
from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import moe as reference
from smkern.ops.reference.fp8 import dequantize
from smkern.tuning.fp8_grouped import ScaledGroupedProblem, selector
from smkern.tuning.grouped import GroupedConfig


def check_grouped(call: Any) -> None:
    """Raise ArgumentError for a grouped GEMM that cannot be served."""
    a, w = call.a, call.w
    check_e4m3("a", a)
    check_matrix("a", a)
    check_e4m3("w", w)
    checks.check_tensor("w", w, 3, "[experts, n, k]")
    checks.check_inner("w", w)
    check_expert_weights(call)
    check_scale_pair(a, w, call.a_scale, call.w_scale)
    check_out_dtype(call, {})


def check_memory(call: Any) -> None:
    """`check=True`: raise ArgumentError for offsets or scales that cannot be."""
    check_offsets(call)
    check_values(call)


def _shapes(call: Any) -> Shapes:
    n = call.w.shape[1] // 2 if call.swiglu else call.w.shape[1]
    return (((call.a.shape[0], n), out_dtype_of(call)),)


def by_reference(call: Any) -> Tensor:
    """The reference on a checked call."""
    found: Tensor = reference.grouped_gemm(
        dequantize(call.a, call.a_scale), dequantize(call.w, call.w_scale), call.expert_offsets,
        swiglu=bool(call.swiglu), batch_invariant=True,
    )  # fmt: skip
    return found.to(out_dtype_of(call))


def _problem(call: Any, aligned: bool) -> ScaledGroupedProblem | None:
    ((rows, n), dtype), (experts, expert_rows, k) = _shapes(call)[0], call.w.shape
    if dtype is torch.float32:
        raise ArgumentError("out_dtype torch.float32 on a GPU: use torch.bfloat16 or float16")
    if not rows:
        return None
    a_stride, swiglu = row_stride(call.a), bool(call.swiglu)
    expert_stride, w_stride = (int(x) for x in call.w.stride()[:2])
    out_stride = n if call.out is None else row_stride(call.out)
    whole = aligned and not any(x % 16 for x in (k, a_stride, expert_stride, w_stride))
    blocks = kind_of(call.w, call.w_scale) == "block"
    # one tensor map holds all experts' weights, if they follow each other; rows must not overlap
    one_matrix = expert_stride == expert_rows * w_stride and min(a_stride, w_stride) >= k
    gated_blocks = swiglu and blocks and n % FP8_BLOCK
    mapped = whole and one_matrix and not (n % 8 or out_stride % 8 or gated_blocks)
    return ScaledGroupedProblem(
        rows, experts, n, k, swiglu, dtype_name(dtype), blocks, whole, mapped, a_stride, w_stride,
        expert_stride, out_stride, *_steps(call, blocks),
    )  # fmt: skip


def _steps(call: Any, blocks: bool) -> tuple[int, int, int, int]:
    """Elements from a scale to the next: of rows and of columns of a, of rows of w, of experts."""
    scale, (experts, expert_rows, _) = call.w_scale, call.w.shape
    if blocks:
        return (*block_steps(call.a_scale), int(scale.stride(1)), int(scale.stride(0)))
    by_row = int(scale.numel() > experts)
    each = expert_rows if by_row else int(scale.numel() > 1)
    return (row_step(call.a_scale), 0, by_row, each)


@cache
def grouped_dispatcher(index: int) -> OperatorDispatcher[ScaledGroupedProblem, GroupedConfig]:
    """The dispatcher of a device that is present.

    Raises:
        DeviceError: a GPU without e4m3.
    """
    from smkern.kernels.fp8.grouped_launch import ScaledGroupedKernels

    found = load_dispatcher(index, ScaledGroupedKernels, selector)
    check_fp8_capability(found.capability)
    return found


SCALED_GROUPED: Operator[ScaledGroupedProblem] = Operator(
    name="scaled_grouped_gemm",
    call=ScaledGrouped,
    check=check_grouped,
    shapes=_shapes,
    problem=_problem,
    reference=by_reference,
    dispatcher=grouped_dispatcher,
    vectors=("a", "w", "out"),
    unkeyed=("check",),
    check_memory=check_memory,
)
LIBRARY = register(SCALED_GROUPED)
scaled_grouped = entry(SCALED_GROUPED)
"""`smkern.grouped_gemm` of e4m3 matrices: the fields of `ScaledGrouped` in order."""
