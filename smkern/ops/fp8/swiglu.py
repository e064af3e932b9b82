"""SwiGLU of e4m3 matrices with scales: the operator behind `smkern.gemm_swiglu(a_scale=, ...)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smkern.ops.fp8.call import ScaledSwiglu, check_swiglu, out_dtype_of, swiglu_shapes
from smkern.ops.fp8.call import given_scales as given_scales
from smkern.ops.fp8.gemm import problem_of
from smkern.ops.fp8.scales import check_values
from smkern.ops.operator import Operator
from smkern.ops.operator_library import register
from smkern.ops.operator_run import entry
from smkern.ops.reference import swiglu as reference
from smkern.ops.reference.fp8 import dequantize


def by_reference(call: ScaledSwiglu) -> Tensor:
    """The reference on a checked call; into `out`, if it has one."""
    found: Tensor = reference.gemm_swiglu(
        dequantize(call.a, call.a_scale), dequantize(call.w_gate_up, call.w_scale), out=call.out,
        batch_invariant=bool(call.batch_invariant), out_dtype=out_dtype_of(call),
    )  # fmt: skip
    return found


def fill(call: ScaledSwiglu) -> None:
    """M, I or K of 0: nothing to write, or silu(0) * 0."""
    if call.out.numel():
        call.out.zero_()


SCALED_SWIGLU: Operator[Any] = Operator(
    name="scaled_gemm_swiglu",
    call=ScaledSwiglu,
    schema="Tensor a, Tensor w_gate_up, Tensor a_scale, Tensor w_scale, *, "
    "ScalarType? out_dtype=None, bool batch_invariant=False, str? backend=None, "
    "bool static_weights=False, bool check=False",
    results=("out",),
    check=check_swiglu,
    shapes=swiglu_shapes,
    problem=problem_of,
    reference=by_reference,
    dispatcher=lambda index: None,
    vectors=("a", "w_gate_up", "out"),
    unkeyed=("workspace", "check"),
    empty=fill,
    check_memory=check_values,
)
LIBRARY = register(SCALED_SWIGLU)
scaled_swiglu = entry(SCALED_SWIGLU)
"""`smkern.gemm_swiglu` of e4m3 matrices: the fields of `ScaledSwiglu` in order."""
