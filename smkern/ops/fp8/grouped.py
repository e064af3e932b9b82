"""Grouped GEMM of e4m3 matrices: the operator behind `smkern.grouped_gemm(a_scale=, w_scale=)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.fp8.call import ScaledGrouped, check_out_dtype, out_dtype_of
from smkern.ops.fp8.call import given_scales as given_scales
from smkern.ops.fp8.scales import check_e4m3, check_scale_pair, check_values
from smkern.ops.gemm.checks import check_matrix
from smkern.ops.moe.check import check_experts
from smkern.ops.operator import Operator, Shapes
from smkern.ops.operator_library import register
from smkern.ops.operator_run import entry
from smkern.ops.reference import moe as reference
from smkern.ops.reference.fp8 import dequantize


def check_grouped(call: ScaledGrouped) -> None:
    """Raise ArgumentError for a grouped GEMM that cannot be served."""
    a, w = call.a, call.w
    check_e4m3("a", a)
    check_matrix("a", a)
    check_e4m3("w", w)
    checks.check_tensor("w", w, 3, "[experts, n, k]")
    checks.check_inner("w", w)
    check_experts(w.shape[0])
    if w.shape[2] != a.shape[1] or not w.shape[1] or not w.shape[2]:
        raise ArgumentError(
            f"w has shape {list(w.shape)}, a {list(a.shape)}: wanted [experts, n, {a.shape[1]}], "
            "n and k at least 1"
        )
    if call.swiglu and w.shape[1] % 2:
        raise ArgumentError(
            f"w has {w.shape[1]} rows an expert: swiglu=True wants as many gate rows as up rows; "
            "pass an even number, or swiglu=False"
        )
    if w.shape[0] * w.shape[1] > checks.MAX_SIZE:
        raise ArgumentError(
            f"w has {w.shape[0]} x {w.shape[1]} rows, the largest number is {checks.MAX_SIZE}: "
            "split the experts"
        )
    checks.check_vector(
        "expert_offsets", call.expert_offsets, w.shape[0] + 1, torch.int32, "[experts + 1]"
    )
    check_scale_pair(a, w, call.a_scale, call.w_scale)
    check_out_dtype(call, {})


def _shapes(call: ScaledGrouped) -> Shapes:
    n = call.w.shape[1] // 2 if call.swiglu else call.w.shape[1]
    return (((call.a.shape[0], n), out_dtype_of(call)),)


def by_reference(call: ScaledGrouped) -> Tensor:
    """The reference on a checked call."""
    found: Tensor = reference.grouped_gemm(
        dequantize(call.a, call.a_scale), dequantize(call.w, call.w_scale), call.expert_offsets,
        swiglu=bool(call.swiglu), batch_invariant=True,
    )  # fmt: skip
    return found.to(out_dtype_of(call))


def _problem(call: ScaledGrouped, aligned: bool) -> Any:
    raise ArgumentError(
        "grouped_gemm of e4m3 has no GPU kernel: use bf16 experts, or CPU tensors for the reference"
    )


SCALED_GROUPED: Operator[Any] = Operator(
    name="scaled_grouped_gemm",
    call=ScaledGrouped,
    schema="Tensor a, Tensor w, Tensor a_scale, Tensor w_scale, Tensor expert_offsets, *, "
    "bool swiglu=False, ScalarType? out_dtype=None, bool check=False",
    results=("out",),
    check=check_grouped,
    shapes=_shapes,
    problem=_problem,
    reference=by_reference,
    dispatcher=lambda index: None,
    vectors=("a", "w", "out"),
    unkeyed=("check",),
    check_memory=check_values,
)
LIBRARY = register(SCALED_GROUPED)
scaled_grouped = entry(SCALED_GROUPED)
"""`smkern.grouped_gemm` of e4m3 matrices: the fields of `ScaledGrouped` in order."""
