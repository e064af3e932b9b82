"""`smkern.merge_states`: attention over a union of keys from attention over its parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.kernels.attention.args import MergeProblem
from smkern.ops import checks
from smkern.ops.operator import Operator, Shapes
from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import attention as reference

MAX_HEAD_DIM = 1024


class Merge(NamedTuple):
    """A call of `merge_states` on stacked states."""

    outs: Any
    lses: Any
    out: Any = None
    lse: Any = None
    num_sms: Any = None


def check_states(call: Merge) -> None:
    """Raise ArgumentError unless these are states and places for their merge."""
    outs = call.outs
    checks.check_tensor("outs", outs, 4, "[n, tokens, heads, head_dim]")
    checks.check_inner("outs", outs)
    checks.dtype_name(outs.dtype)
    if outs.shape[0] < 1 or not 1 <= outs.shape[3] <= MAX_HEAD_DIM:
        raise ArgumentError(
            f"outs has shape {list(outs.shape)}: there must be a state, and a head_dim of 1 to "
            f"{MAX_HEAD_DIM}"
        )
    if outs.shape[:3].numel() > checks.MAX_SIZE:
        raise ArgumentError(
            f"outs has shape {list(outs.shape)}: states x tokens x heads are more than "
            f"{checks.MAX_SIZE}; merge fewer tokens at a time"
        )
    layout = "fp32, outs' shape without head_dim"
    checks.check_sums("lses", call.lses, outs.shape[:3], layout)
    if call.lse is not None:
        checks.check_sums("lse", call.lse, outs.shape[1:3], layout)


def shapes_of(call: Merge) -> Shapes:
    """Shape and dtype of a checked call's results."""
    _, tokens, heads, head_dim = call.outs.shape
    return ((tokens, heads, head_dim), call.outs.dtype), ((tokens, heads), torch.float32)


def problem_of(call: Merge, aligned: bool) -> MergeProblem | None:
    """What chooses the kernel of a checked call; None where nothing is merged."""
    outs = call.outs
    states, tokens, heads, head_dim = outs.shape
    if not (tokens and heads):
        return None
    whole = aligned and not any(step % (16 // outs.element_size()) for step in _steps(call))
    return MergeProblem(states, tokens * heads, head_dim, checks.dtype_name(outs.dtype), whole)


def numbers_of(call: Merge) -> tuple[int, ...]:
    """What a launch takes behind the addresses; results are there, as tensors on any device."""
    outs, steps = call.outs, _steps(call)
    unit = 16 // outs.element_size()
    whole = not ((outs.data_ptr() | call.out.data_ptr()) % 16 or any(x % unit for x in steps))
    states, tokens, heads, _ = outs.shape
    return (*(step // (unit if whole else 1) for step in steps), states, tokens, heads, 1)


def _steps(call: Merge) -> tuple[int, ...]:
    """Elements between states, tokens and heads of `outs`, tokens and heads of `out`."""
    _, _, heads, head_dim = call.outs.shape
    out = (heads * head_dim, head_dim) if call.out is None else call.out.stride()[:2]
    return (*call.outs.stride()[:3], *out)


@cache
def merge_dispatcher(index: int) -> OperatorDispatcher[MergeProblem, None]:
    """The merges of a device that is present; there is one configuration."""
    from smkern.kernels.attention.merge_triton import MergeKernels

    return load_dispatcher(index, MergeKernels, lambda profile: lambda problem, budget: None)


MERGE: Operator[MergeProblem] = Operator(
    name="merge_states",
    call=Merge,
    schema="Tensor outs, Tensor lses",
    results=("out", "lse"),
    check=check_states,
    shapes=shapes_of,
    problem=problem_of,
    numbers=numbers_of,
    reference=lambda call: reference.merge_states(call.outs, call.lses, out=call.out, lse=call.lse),
    dispatcher=merge_dispatcher,
    vectors=("outs", "out"),
)
LIBRARY = register(MERGE)
_merge_states = entry(MERGE)


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a union of keys from attention over its parts, as in cascades.

    lse = log sum_i exp(lses_i), out = sum_i exp(lses_i - lse) outs_i, in fp32, in the order of the
    parts. A part that saw no key (lse -inf) counts for nothing, whatever its out holds. Sinks are a
    part's keys too: give them to one part only.

    Args:
        outs: [n, tokens, heads, head_dim], bf16, fp16 or fp32, inner stride 1; or n tensors, which
            torch stacks first (a copy, which a budget below the stream's does not confine).
        lses: [n, tokens, heads] fp32, contiguous; or n tensors. Natural logarithm.
        out: [tokens, heads, head_dim] to write into; overlaps nothing.
        lse: [tokens, heads] fp32, contiguous, to write into.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        (out, lse); 0 and -inf where no part saw a key.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition; CPU
            tensors take any from 1, having no device to exceed.
        ArgumentError: shapes, dtypes, strides, devices or overlaps that cannot be served.
        DeviceError: the GPU is older than sm_80.
        WarmupError: a graph capture met a kernel that is not loaded.

    Source: FlashInfer (arXiv 2501.01005) section 2.2, attention states and their composition.

    Example:
        >>> import torch, smkern
        >>> outs = torch.stack([torch.zeros(1, 1, 64), torch.ones(1, 1, 64)])
        >>> smkern.merge_states(outs, torch.zeros(2, 1, 1))[0].unique().tolist()
        [0.5]
    """
    found: tuple[Tensor, Tensor] = _merge_states(
        _stacked("outs", outs), _stacked("lses", lses), out, lse, num_sms
    )
    return found


def _stacked(name: str, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    parts = list(x) if isinstance(x, (list, tuple)) else []
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise ArgumentError(
            f"{name} is {type(x).__name__}: pass a stacked tensor, or a list of at least one"
        )
    if any(part.shape != parts[0].shape or part.dtype is not parts[0].dtype for part in parts):
        raise ArgumentError(f"{name} holds tensors of several shapes or dtypes: they must agree")
    return torch.stack(parts)
