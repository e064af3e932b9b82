"""`moe_permute`: each token's row once a choice, sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.ops import checks
from smkern.ops.fp8 import permute as fp8
from smkern.ops.moe.check import (
    check_permuted,
    gpu_dtype,
    permuted_shapes,
    results_of,
    row_step,
    whole,
)
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.operator import Operator, call_class
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import moe as reference
from smkern.tuning.moe import PermuteProblem

Permute = call_class(
    "Permute", "Tensor x, Tensor experts, int num_experts", ("rows", "expert_offsets", "index")
)


def _problem(call: Any, aligned: bool) -> PermuteProblem:
    gpu_dtype("x", call.x)
    tokens, hidden = call.x.shape
    is_whole = aligned and whole(hidden, call.x, call.rows)
    return PermuteProblem(tokens, call.experts.shape[1], call.num_experts, hidden, is_whole)


def _numbers(call: Any) -> tuple[int, ...]:
    hidden = call.x.shape[1]
    return row_step(call.x, hidden), row_step(call.rows, hidden)


def _workspace(problem: PermuteProblem) -> int:
    from smkern.kernels.moe_launch import workspace_bytes

    return workspace_bytes(problem)


PERMUTE: Operator[PermuteProblem] = Operator(
    name="moe_permute",
    call=Permute,
    check=check_permuted,
    shapes=lambda call: permuted_shapes(call, call.x.dtype),
    problem=_problem,
    numbers=_numbers,
    reference=lambda call: reference.moe_permute(call.x, call.experts, call.num_experts),
    dispatcher=moe_dispatcher,
    vectors=("x", "rows"),
    workspace=_workspace,
)
LIBRARY = register(PERMUTE)
_permute = entry(PERMUTE)


def moe_permute(
    x: Tensor,
    experts: Tensor,
    num_experts: int,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    out_scale: Tensor | None = None,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's row once for each of its experts, sorted by expert, on at most `num_sms` SMs.

    Choice (t, j) lies behind all choices of lower experts and behind the earlier ones of its own:
    rows[index[t * top_k + j]] = x[t]. The order is stable and found on the device; it and the rows
    are the same in every budget. A choice that is no expert (outside 0 to num_experts - 1) gets
    index -1 and no row; rows behind expert_offsets[-1] hold nothing of meaning.

    Args:
        x: [tokens, hidden], bf16 or fp16 (fp32 on CPU tensors), rows may be apart.
        experts: [tokens, top_k] int32 without gaps, from `smkern.topk_softmax`.
        num_experts: 1 to 512.
        out: (rows, expert_offsets, index) to write into.
        out_scale: Write rows of e4m3, quantised once a token, and their scales here, fp32: [tokens
            * top_k], a scale a row, or [tokens * top_k, hidden / 128], one for 128 columns, by rows
            or by columns without gaps. hidden is even.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        rows [tokens * top_k, hidden], expert_offsets [num_experts + 1] int32 (where each expert's
        rows begin, and the last end), index [tokens * top_k] int32.

    Raises:
        As `smkern.gemm`.

    Source: the dispatch of GShard (arXiv 2006.16668) section 2.2, without capacities, as rows
        sorted for a grouped product (MegaBlocks, arXiv 2211.15841, section 4).

    Example:
        >>> import torch, smkern
        >>> x, experts = torch.tensor([[1.0], [2.0]]), torch.tensor([[2, 0], [0, 2]]).int()
        >>> rows, offsets, index = smkern.moe_permute(x, experts, 3)
        >>> rows[:, 0].tolist(), offsets.tolist(), index.tolist()
        ([1.0, 2.0, 1.0, 2.0], [0, 2, 2, 4], [2, 0, 1, 3])
    """
    rows, offsets, index = results_of(out, "rows", "expert_offsets", "index")
    if num_experts.__class__ is not int and not torch.compiler.is_compiling():
        num_experts = checks.as_int("num_experts", num_experts, 1)
    if out_scale is not None:
        scaled: tuple[Tensor, Tensor, Tensor] = fp8.scaled_permute(
            x, experts, out_scale, num_experts, rows, offsets, index, num_sms
        )
        return scaled
    found: tuple[Tensor, Tensor, Tensor] = _permute(
        x, experts, num_experts, rows, offsets, index, num_sms
    )
    return found
