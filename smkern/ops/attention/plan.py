"""The plan of an attention step: what layers share, and what its numbers must satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.kernels.attention.args import WorkspaceLayout
from smkern.kernels.attention.items import PlanLayout
from smkern.ops.checks import (
    MAX_SIZE,
    as_flag,
    as_int,
    as_window,
    check_head_counts,
    check_lengths,
    check_page_size,
    check_requests,
)
from smkern.tuning.attention.shapes import AttentionShape, Budget


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How the CTAs of a budget share an attention step; made by `smkern.plan_attention`.

    One plan serves every layer of a step, one launch at a time: its launches keep their partial
    results in the plan's workspace, so two of them must not overlap.

    Attributes:
        shape: The host numbers that it was made for.
        budget: The SMs that it deals the work to.
        buffer: int32 [words] on the lengths' device: the work items.
        workspace: uint8 [workspace_bytes] there: arrival counters and fp32 partials.
    """

    shape: AttentionShape
    budget: Budget
    buffer: Tensor
    workspace: Tensor
    key: tuple[int, ...] = field(init=False, repr=False)
    """What a launch by this plan depends on, its addresses left out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (*self.numbers, self.buffer.get_device()))

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.nbytes

    @property
    def numbers(self) -> list[int]:
        """Shape and budget as whole numbers, for a graph that knows only tensors and numbers."""
        s, b = self.shape, self.budget
        return [
            s.batch, s.num_q_heads, s.num_kv_heads, s.head_dim, s.page_size, s.max_q_len,
            s.max_kv_len, s.max_tokens, s.max_total_kv, int(s.causal), s.window,
            b.num_sms, int(b.confined == "mask"), int(b.clusters),
        ]  # fmt: skip


def plan_from_numbers(numbers: Sequence[int], buffer: Tensor, workspace: Tensor) -> Plan:
    """The plan whose `numbers`, buffer and workspace these are."""
    *sizes, num_sms, mask, clusters = (int(x) for x in numbers)
    given: dict[str, Any] = dict(zip(AttentionShape.__dataclass_fields__, sizes, strict=True))
    shape = AttentionShape(**given | {"causal": bool(given["causal"])})
    budget = Budget(num_sms, "mask" if mask else "grid", bool(clusters))
    return Plan(shape, budget, buffer, workspace)


def plan_sizes(shape: AttentionShape) -> tuple[int, int]:
    """Words of a plan's buffer and bytes of its workspace.

    Raises:
        ArgumentError: a plan of this shape has more words than an index counts.
    """
    words = PlanLayout.of(shape).words
    if words > MAX_SIZE:
        raise ArgumentError(
            f"a plan of {shape} has {words} words, at most {MAX_SIZE} can be indexed: bound the "
            "step by num_tokens and max_total_kv, or split the batch"
        )
    return words, WorkspaceLayout.of(shape).num_bytes


def empty_plan(shape: AttentionShape, budget: Budget, device: torch.device) -> Plan:
    """A plan whose buffers are allocated and hold nothing yet.

    Raises:
        ArgumentError: a plan of this shape has more words than an index counts.
    """
    words, size = plan_sizes(shape)
    buffer = torch.empty(words, dtype=torch.int32, device=device)
    return Plan(shape, budget, buffer, torch.empty(size, dtype=torch.uint8, device=device))


class PlanNumbers(NamedTuple):
    """The arguments of `plan_attention` that are no tensors, as they came."""

    num_q_heads: Any
    num_kv_heads: Any
    head_dim: Any
    page_size: Any
    max_q_len: Any
    max_kv_len: Any
    causal: Any
    window: Any
    num_tokens: Any
    max_total_kv: Any


def shape_of_plan(kv_lens: Any, cu_q_lens: Any, given: PlanNumbers) -> AttentionShape:
    """Check the arguments of a plan, all but `out`, `num_sms` and what lies on the device.

    Raises:
        ArgumentError: naming the argument, its value, what is wanted and what to do.
    """
    batch = check_lengths(kv_lens, cu_q_lens)
    check_requests(batch)
    check_head_counts(given.num_q_heads, given.num_kv_heads, given.head_dim)
    check_page_size(given.page_size)
    max_q_len = as_int("max_q_len", given.max_q_len, 1)
    if cu_q_lens is None and max_q_len != 1:
        raise ArgumentError(
            f"max_q_len={max_q_len} without cu_q_lens: one query token a request is meant; pass "
            "cu_q_lens, or leave max_q_len at 1"
        )
    max_kv_len = as_int("max_kv_len", given.max_kv_len, 0)
    tokens = batch * max_q_len
    if given.num_tokens is not None:
        tokens = as_int("num_tokens", given.num_tokens, 0)
        if cu_q_lens is None and tokens != batch:
            raise ArgumentError(
                f"num_tokens={tokens} without cu_q_lens, wanted {batch}, one a request: pass "
                "cu_q_lens, or leave num_tokens at None"
            )
    total = batch * max_kv_len
    if given.max_total_kv is not None:
        total = min(total, as_int("max_total_kv", given.max_total_kv, 0, None))
    return AttentionShape(
        batch=batch,
        num_q_heads=int(given.num_q_heads),
        num_kv_heads=int(given.num_kv_heads),
        head_dim=int(given.head_dim),
        page_size=int(given.page_size),
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        max_tokens=min(tokens, MAX_SIZE),
        max_total_kv=total,
        causal=as_flag("causal", given.causal),
        window=as_window(given.window),
    )


def check_refill(plan: Any, shape: AttentionShape, budget: Budget, device: torch.device) -> None:
    """Raise ArgumentError unless a plan can be made anew by these numbers."""
    if not isinstance(plan, Plan):
        raise ArgumentError(
            f"out is {type(plan).__name__}, not a smkern.Plan: pass what plan_attention returned"
        )
    if plan.shape != shape:
        raise ArgumentError(
            f"out is a plan of {differences(plan.shape, shape)}: refill it with the numbers that "
            "it was made with, or make a new one with out=None"
        )
    check_place(plan, budget, device, "out")


def check_plan_device(plan: Plan, device: torch.device, name: str) -> None:
    """Raise ArgumentError unless a plan is on this device."""
    for x in (plan.buffer, plan.workspace):
        if x.device != device:
            raise ArgumentError(
                f"{name} is a plan on {x.device}, the call is on {device}: make one there"
            )


def check_place(plan: Plan, budget: Budget, device: torch.device, name: str) -> None:
    """Raise ArgumentError unless a plan is on this device and for this many SMs."""
    check_plan_device(plan, device, name)
    if plan.budget.num_sms != budget.num_sms:
        raise ArgumentError(
            f"{name} is a plan for {plan.budget.num_sms} SMs, this call has {budget.num_sms}: make "
            f"a plan on this stream, or pass the num_sms that the plan was made with"
        )


def differences(plan: AttentionShape, wanted: AttentionShape) -> str:
    """ "batch 3 (here 4), …": the numbers in which two shapes differ."""
    names = AttentionShape.__dataclass_fields__
    pairs = ((name, getattr(plan, name), getattr(wanted, name)) for name in names)
    return ", ".join(f"{name} {x} (here {y})" for name, x, y in pairs if x != y)
