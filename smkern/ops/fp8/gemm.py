"""GEMM of e4m3 matrices with scales: the operator behind `smkern.gemm(a_scale=, w_scale=)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smkern.ops.fp8.call import ScaledGemm, check_gemm, gemm_shapes, out_dtype_of
from smkern.ops.fp8.call import given_scales as given_scales
from smkern.ops.fp8.dispatch import bind_gemm, fp8_dispatcher, problem_of
from smkern.ops.fp8.scales import check_values
from smkern.ops.operator import Operator, filled_by
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import gemm as reference
from smkern.ops.reference.fp8 import dequantize
from smkern.tuning.fp8 import ScaledProblem

LAUNCHED = ("a", "w", "a_scale", "w_scale", "out", "bias", "residual", "workspace", "stream")
"""What a launch takes, in order."""


def by_reference(call: Any) -> Tensor:
    """The reference on a checked call; into `out`, if it has one."""
    found: Tensor = reference.gemm(
        dequantize(call.a, call.a_scale), dequantize(call.w, call.w_scale), bias=call.bias,
        residual=call.residual, activation=call.activation, out=call.out,
        batch_invariant=bool(call.batch_invariant), out_dtype=out_dtype_of(call),
    )  # fmt: skip
    return found


SCALED_GEMM: Operator[ScaledProblem] = Operator(
    name="scaled_gemm",
    call=ScaledGemm,
    check=check_gemm,
    shapes=gemm_shapes,
    problem=problem_of,
    reference=by_reference,
    dispatcher=fp8_dispatcher,
    vectors=("a", "w", "bias", "residual", "out"),
    watched=("a_scale", "w_scale"),
    in_place=(("out", "residual"),),
    arguments=LAUNCHED,
    unkeyed=("workspace", "check"),
    prepare=bind_gemm,
    empty=filled_by(by_reference),
    check_memory=check_values,
    kept_in_capture=False,  # a capture gets our kernel where cuBLASLt never ran
)
LIBRARY = register(SCALED_GEMM)
scaled_gemm = entry(SCALED_GEMM)
"""`smkern.gemm` of e4m3 matrices: the fields of `ScaledGemm` in order."""
