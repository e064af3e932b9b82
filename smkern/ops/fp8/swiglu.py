"""SwiGLU of e4m3 matrices with scales: the operator behind `smkern.gemm_swiglu(a_scale=, ...)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smkern.ops.fp8.call import ScaledSwiglu, check_swiglu, out_dtype_of, swiglu_shapes
from smkern.ops.fp8.call import given_scales as given_scales
from smkern.ops.fp8.dispatch import ScaledDispatcher, bind_plan, fp8_dispatcher, problem_from
from smkern.ops.fp8.scales import check_values
from smkern.ops.gemm.call import row_stride
from smkern.ops.operator import Bound, Operator, filled_by
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import swiglu as reference
from smkern.ops.reference.fp8 import dequantize
from smkern.ops.rows.dispatch import rows_dispatcher
from smkern.tuning.config import Budget, Epilogue
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.rows import VECTOR, RowsProblem


def by_reference(call: Any) -> Tensor:
    """The reference on a checked call; into `out`, if it has one."""
    found: Tensor = reference.gemm_swiglu(
        dequantize(call.a, call.a_scale), dequantize(call.w_gate_up, call.w_scale), out=call.out,
        batch_invariant=bool(call.batch_invariant), out_dtype=out_dtype_of(call),
    )  # fmt: skip
    return found


def problem_of(call: Any, aligned: bool) -> ScaledProblem | None:
    """The product's problem: gate and up, which are then in scratch memory."""
    return problem_from(call, call.w_gate_up, Epilogue(), [], aligned)


def bind(
    dispatcher: ScaledDispatcher, call: Any, problem: ScaledProblem, budget: Budget, capturing: bool
) -> Bound:
    """The product into scratch memory, then `silu_and_mul` out of it."""
    plan = dispatcher.launch(problem, budget, capturing=capturing)
    gemm = bind_plan(plan, call, call.w_gate_up, problem.n)
    width = problem.n // 2
    out_step = width if call.out is None else row_stride(call.out)
    aligned = problem.aligned and not (width % VECTOR or out_step % VECTOR)
    dtype: Any = problem.out_dtype
    rows = RowsProblem("silu_and_mul", problem.m, width, dtype, dtype, aligned=aligned)
    silu = rows_dispatcher(dispatcher.index).launch(rows, budget, capturing=capturing)
    unit = VECTOR if aligned else 1
    numbers = (problem.n // unit, out_step // unit, problem.m)
    product: Any = gemm.launch

    def launch(
        a: int, w: int, a_scale: int, w_scale: int, out: int, scratch: int, workspace: int,
        stream: int,
    ) -> None:  # fmt: skip
        product(a, w, a_scale, w_scale, scratch, 0, 0, workspace, stream)
        silu(stream, scratch, out, *numbers)

    room = 2 * problem.m * problem.n
    return Bound(launch, workspace_bytes=gemm.workspace_bytes, scratch_bytes=room)


SCALED_SWIGLU: Operator[ScaledProblem] = Operator(
    name="scaled_gemm_swiglu",
    call=ScaledSwiglu,
    check=check_swiglu,
    shapes=swiglu_shapes,
    problem=problem_of,
    reference=by_reference,
    dispatcher=fp8_dispatcher,
    vectors=("a", "w_gate_up", "out"),
    watched=("a_scale", "w_scale"),
    arguments=("a", "w_gate_up", "a_scale", "w_scale", "out", "scratch", "workspace", "stream"),
    unkeyed=("workspace", "check"),
    prepare=bind,
    empty=filled_by(by_reference),
    check_memory=check_values,
    kept_in_capture=False,  # see the product alone
)
LIBRARY = register(SCALED_SWIGLU)
scaled_swiglu = entry(SCALED_SWIGLU)
"""`smkern.gemm_swiglu` of e4m3 matrices: the fields of `ScaledSwiglu` in order."""
