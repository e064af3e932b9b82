"""`moe_permute` that writes e4m3: rows are quantised once each, then copied once a choice."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smkern.errors import ArgumentError, WarmupError
from smkern.ops.checks import FP8
from smkern.ops.fp8.rows import check_out_scale, group_of
from smkern.ops.fp8.rows_dispatch import problem_of as rows_problem
from smkern.ops.fp8.rows_dispatch import quant_dispatcher, scale_steps, step_of
from smkern.ops.moe.check import check_permuted, permuted_shapes
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.operator import Bound, Operator, call_class
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import fp8 as reference
from smkern.ops.reference import moe as moe_reference
from smkern.tuning.fp8_rows import Budget, QuantProblem
from smkern.tuning.moe import PermuteProblem
from smkern.tuning.rows import VECTOR

ScaledPermute = call_class(
    "ScaledPermute",
    "Tensor x, Tensor experts, Tensor(a!) out_scale, int num_experts",
    ("rows", "expert_offsets", "index"),
)


def check_permute(call: Any) -> None:
    """Raise ArgumentError for a permutation that cannot be served."""
    check_permuted(call)
    hidden = call.x.shape[1]
    if hidden % 2 or step_of(call.rows) % 2:
        raise ArgumentError(
            f"x has {hidden} columns, rows of e4m3 {step_of(call.rows)} apart: both must be even, "
            "as pairs are copied; pad x with zeros"
        )
    check_out_scale(call.out_scale, call.experts.numel(), hidden)


def by_reference(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The reference on a checked call; its scales are written."""
    rows, offsets, index = moe_reference.moe_permute(call.x, call.experts, call.num_experts)
    q, scale = reference.quantize(rows, group_of(call.out_scale))
    call.out_scale.copy_(scale)
    return q, offsets, index


def _problem(call: Any, aligned: bool) -> QuantProblem | None:
    x, group = call.x, group_of(call.out_scale)
    return rows_problem("quantize", group, x, x.shape[1], [call.rows], aligned)


def fill(call: Any) -> None:
    """No rows, or rows of nothing."""
    if call.experts.numel():
        _, offsets, index = by_reference(call)
        call.expert_offsets.copy_(offsets)
        call.index.copy_(index)
    else:
        call.expert_offsets.zero_()


def _bind(
    dispatcher: Any, call: Any, problem: QuantProblem, budget: Budget, capturing: bool
) -> Bound:
    """Quantise into scratch memory, permute pairs of e4m3 as 16 bits, then their scales."""
    from smkern.kernels.fp8.scatter_launch import ScatterVariant, is_loaded, scatter
    from smkern.kernels.moe_launch import workspace_bytes

    p, device = problem, call.x.get_device()
    groups = call.out_scale.shape[1] if p.group == "block" else 1
    steps = scale_steps(call.out_scale, p)
    unit = VECTOR if p.aligned else 1
    quantize = dispatcher.launch(p, budget, capturing=capturing)
    given = (step_of(call.x) // unit, p.width // unit, groups, 1, p.rows)
    out_step = p.width if call.rows is None else step_of(call.rows)
    whole = p.aligned and not (p.width % 16 or out_step % 16)
    pairs = PermuteProblem(p.rows, call.experts.shape[1], call.num_experts, p.width // 2, whole)
    permute = moe_dispatcher(device).launch(pairs, budget, capturing=capturing)
    variant = ScatterVariant(pairs.top_k, groups, dispatcher.capability)
    if capturing and not is_loaded(variant):
        raise WarmupError(
            "moe_permute with out_scale needs a kernel that is not loaded, and a graph capture "
            "cannot load one: call it once before, or warm up by smkern.Fp8Calls(permuted=...)"
        )
    spread = scatter(variant, budget, pairs.choices)
    scales_at = -(-p.rows * p.width // 256) * 256
    room_at = scales_at + -(-4 * p.rows * groups // 256) * 256
    counts = workspace_bytes(pairs)

    def launch(
        stream: int, x: int, experts: int, out_scale: int, rows: int, offsets: int, index: int,
        scratch: int,
    ) -> None:  # fmt: skip
        if rows % 2:
            raise ArgumentError(
                f"rows of e4m3 begin at the odd address {rows:#x}, and pairs are copied: pass rows "
                "that begin at an even one"
            )
        scales, room = scratch + scales_at, scratch + room_at
        quantize(stream, x, scratch, scales, *given)
        rest = (room,) if counts else ()
        permute(stream, scratch, experts, rows, offsets, index, *rest, p.width // 2, out_step // 2)
        spread(stream, scales, index, out_scale, *steps, pairs.choices)

    return Bound(launch, scratch_bytes=room_at + counts)


SCALED_PERMUTE: Operator[QuantProblem] = Operator(
    name="scaled_moe_permute",
    call=ScaledPermute,
    check=check_permute,
    shapes=lambda call: permuted_shapes(call, FP8),
    problem=_problem,
    reference=by_reference,
    dispatcher=quant_dispatcher,
    vectors=("x", "rows"),
    arguments=(
        "stream", "x", "experts", "out_scale", "rows", "expert_offsets", "index", "scratch",
    ),
    prepare=_bind,
    empty=fill,
)  # fmt: skip
LIBRARY = register(SCALED_PERMUTE)
scaled_permute = entry(SCALED_PERMUTE)
"""`smkern.moe_permute` to e4m3: the fields of `ScaledPermute` in order."""
