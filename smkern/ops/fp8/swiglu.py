"""SwiGLU of e4m3 matrices: the operators behind `smkern.gemm_swiglu` with scales and `out_scale=`.

Into e4m3 it is one kernel where that fits. All else is the product into memory between, and then
silu(gate) * up out of it, quantized where the result is e4m3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.checks import FLOATS, FP8
from smkern.ops.fp8.call import (
    QuantizedSwiglu,
    ScaledSwiglu,
    check_gated,
    check_swiglu,
    out_dtype_of,
    swiglu_shapes,
)
from smkern.ops.fp8.call import given_scales as given_scales
from smkern.ops.fp8.dispatch import (
    ScaledDispatcher,
    bind_plan,
    fp8_dispatcher,
    fuses,
    problem_from,
)
from smkern.ops.fp8.rows import check_out_scale, group_of
from smkern.ops.fp8.rows_dispatch import quant_dispatcher, scale_steps
from smkern.ops.fp8.scales import block_steps, check_values
from smkern.ops.gemm.call import row_stride
from smkern.ops.gemm.checks import check_matrix
from smkern.ops.operator import Bound, Operator, filled_by
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import swiglu as reference
from smkern.ops.reference.fp8 import dequantize, quantize
from smkern.ops.reference.rows import silu_and_mul
from smkern.ops.rows.dispatch import rows_dispatcher
from smkern.tuning import fp8
from smkern.tuning.config import Budget, Epilogue
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.fp8_rows import QuantProblem
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


def _gate_and_up(
    plan: Any, call: Any, problem: ScaledProblem
) -> tuple[Bound, bool, tuple[int, int]]:
    """The product of gate and up; of the launch behind it, whether it takes whole vectors, and what
    it steps by between rows that it reads and writes."""
    gemm, width = bind_plan(plan, call, call.w_gate_up, problem.n), problem.n // 2
    out_step = width if call.out is None else row_stride(call.out)
    aligned = problem.aligned and not (width % VECTOR or out_step % VECTOR)
    unit = VECTOR if aligned else 1
    return gemm, aligned, (problem.n // unit, out_step // unit)


def bind(
    dispatcher: ScaledDispatcher, call: Any, problem: ScaledProblem, budget: Budget, capturing: bool
) -> Bound:
    """The product into scratch memory, then `silu_and_mul` out of it."""
    plan = dispatcher.launch(problem, budget, capturing=capturing)
    gemm, aligned, steps = _gate_and_up(plan, call, problem)
    dtype: Any = problem.out_dtype
    rows = RowsProblem("silu_and_mul", problem.m, problem.n // 2, dtype, dtype, aligned=aligned)
    silu = rows_dispatcher(dispatcher.index).launch(rows, budget, capturing=capturing)
    product: Any = gemm.launch

    def launch(
        a: int, w: int, a_scale: int, w_scale: int, out: int, scratch: int, workspace: int,
        stream: int,
    ) -> None:  # fmt: skip
        product(a, w, a_scale, w_scale, scratch, 0, 0, workspace, stream)
        silu(stream, scratch, out, *steps, problem.m)

    room = 2 * problem.m * problem.n
    return Bound(launch, workspace_bytes=gemm.workspace_bytes, scratch_bytes=room)


def check_quantized(call: Any) -> None:
    """Raise ArgumentError for a product that cannot be served."""
    check_gated(call)
    rows, width = call.a.shape[0], call.w_gate_up.shape[0] // 2
    check_out_scale(call.out_scale, rows, width)
    if call.gate_up is not None:
        check_matrix("gate_up", call.gate_up, rows, 2 * width)
        if call.gate_up.dtype not in FLOATS:
            raise ArgumentError(
                f"gate_up is {call.gate_up.dtype}: it takes gate and up, in torch.bfloat16 or "
                "torch.float16 (torch.float32 on CPU tensors)"
            )
        if not call.gate_up.is_contiguous():
            raise ArgumentError(
                f"gate_up has strides {call.gate_up.stride()}, wanted rows without gaps: pass a "
                "contiguous one, or None"
            )


def dtype_of(call: Any) -> torch.dtype:
    """What gate and up are rounded to."""
    found: torch.dtype = torch.bfloat16 if call.gate_up is None else call.gate_up.dtype
    return found


def quantized_reference(call: Any) -> Tensor:
    """The reference on a checked call; its scales are written."""
    a = dequantize(call.a, call.a_scale)
    w = dequantize(call.w_gate_up, call.w_scale)
    rows = a.split(1) if call.batch_invariant else [a]
    gate_up = torch.cat([x @ w.T for x in rows]).to(dtype_of(call))
    q, scale = quantize(silu_and_mul(gate_up), group_of(call.out_scale))
    call.out_scale.copy_(scale)
    if call.out is None:
        return q
    call.out.copy_(q)
    out: Tensor = call.out
    return out


class _Product:
    """A call as the choice of a product's kernel reads it."""

    def __init__(self, call: Any) -> None:
        self.a, self.a_scale, self.w_scale = call.a, call.a_scale, call.w_scale
        self.backend = None
        self.batch_invariant, self.out_dtype, self.out = call.batch_invariant, dtype_of(call), None


def quantized_problem(call: Any, aligned: bool) -> ScaledProblem | None:
    """What chooses the kernels: the product's problem."""
    return problem_from(_Product(call), call.w_gate_up, Epilogue(), [], aligned)


def is_fused(call: Any, problem: ScaledProblem, capability: tuple[int, int]) -> bool:
    """Whether one kernel does it all.

    Raises:
        ArgumentError: a backend that is none of this operator's, or cannot.
    """
    whole_rows = call.out is None or row_stride(call.out) % fp8.GATED_UNIT == 0
    into_blocks = group_of(call.out_scale) == "block" and whole_rows
    return fuses(problem, capability, call.backend, into_blocks=into_blocks)


def bind_quantized(
    dispatcher: ScaledDispatcher, call: Any, problem: ScaledProblem, budget: Budget, capturing: bool
) -> Bound:
    """One launch, or the product into `gate_up` or scratch memory and a launch out of it."""
    if is_fused(call, problem, dispatcher.profile.info.capability):
        problem = replace(problem, epilogue=Epilogue(swiglu=True))
    plan: Any = dispatcher.launch(problem, budget, capturing=capturing)
    if problem.epilogue.swiglu:
        return _bind_fused(plan, call, problem)
    gemm, aligned, steps = _gate_and_up(plan, call, problem)
    dtype: Any = problem.out_dtype
    group, width = group_of(call.out_scale), problem.n // 2
    rows = QuantProblem("silu_and_mul", group, problem.m, width, dtype, dtype, aligned)
    silu = quant_dispatcher(dispatcher.index).launch(rows, budget, capturing=capturing)
    numbers = (*steps, *scale_steps(call.out_scale, rows), problem.m)
    product: Any = gemm.launch

    def launch(
        a: int, w: int, a_scale: int, w_scale: int, out_scale: int, gate_up: int, out: int,
        scratch: int, workspace: int, stream: int,
    ) -> None:  # fmt: skip
        between = gate_up or scratch
        product(a, w, a_scale, w_scale, between, 0, 0, workspace, stream)
        silu(stream, between, out_scale, out, *numbers)

    room = 0 if call.gate_up is not None else 2 * problem.m * problem.n
    return Bound(launch, workspace_bytes=gemm.workspace_bytes, scratch_bytes=room)


def _bind_fused(plan: Any, call: Any, problem: ScaledProblem) -> Bound:
    from smkern.kernels.fp8.gated_launch import GatedStrides

    out_stride = problem.n // 2 if call.out is None else row_stride(call.out)
    strides = GatedStrides(
        row_stride(call.a), row_stride(call.w_gate_up), out_stride, *block_steps(call.out_scale),
        *block_steps(call.a_scale), int(call.w_scale.stride(0)),
    )  # fmt: skip
    run = plan.bind(strides, static_weights=bool(call.static_weights))

    def fused(
        a: int, w: int, a_scale: int, w_scale: int, out_scale: int, gate_up: int, out: int,
        scratch: int, workspace: int, stream: int,
    ) -> None:  # fmt: skip
        run(a, w, a_scale, w_scale, out_scale, out, stream)

    return Bound(fused)


_swiglu = partial(
    Operator,
    dispatcher=fp8_dispatcher,
    watched=("a_scale", "w_scale"),
    unkeyed=("workspace", "check"),
    check_memory=check_values,
    kept_in_capture=False,  # see the product alone
)
SCALED_SWIGLU: Operator[ScaledProblem] = _swiglu(
    name="scaled_gemm_swiglu",
    call=ScaledSwiglu,
    check=check_swiglu,
    shapes=swiglu_shapes,
    problem=problem_of,
    reference=by_reference,
    vectors=("a", "w_gate_up", "out"),
    arguments=("a", "w_gate_up", "a_scale", "w_scale", "out", "scratch", "workspace", "stream"),
    prepare=bind,
    empty=filled_by(by_reference),
)
QUANTIZED_SWIGLU: Operator[ScaledProblem] = _swiglu(
    name="quantized_gemm_swiglu",
    call=QuantizedSwiglu,
    check=check_quantized,
    shapes=lambda call: (((call.a.shape[0], call.w_gate_up.shape[0] // 2), FP8),),
    problem=quantized_problem,
    reference=quantized_reference,
    vectors=("a", "w_gate_up", "gate_up", "out"),
    arguments=(
        "a", "w_gate_up", "a_scale", "w_scale", "out_scale", "gate_up", "out", "scratch",
        "workspace", "stream",
    ),
    prepare=bind_quantized,
    empty=filled_by(quantized_reference),
)  # fmt: skip
LIBRARY = register(SCALED_SWIGLU, QUANTIZED_SWIGLU)
scaled_swiglu = entry(SCALED_SWIGLU)
"""`smkern.gemm_swiglu` of e4m3 matrices: the fields of `ScaledSwiglu` in order."""
quantized_swiglu = entry(QUANTIZED_SWIGLU)
"""The same into e4m3: the fields of `QuantizedSwiglu` in order."""
