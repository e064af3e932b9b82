"""`smkern::plan_attention` and its `_out` in torch.library.

A plan is two buffers and the numbers that they were made for (`Plan.numbers`), the SMs among them:
an operator has nothing else to tell one budget from another by, so its caller resolves it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.ops import checks
from smkern.ops.attention.plan import (
    Plan,
    PlanNumbers,
    check_refill,
    empty_plan,
    plan_from_numbers,
    shape_of_plan,
)
from smkern.ops.attention.plan_eager import eager_plans, host_budget, plan_here
from smkern.ops.operator_library import NAMESPACE, define
from smkern.tuning.attention.shapes import AttentionShape, Budget

_GIVEN = "Tensor kv_lens, Tensor? cu_q_lens"
_OPTIONS = "SymInt[] numbers, bool check=False"
SCHEMA = f"plan_attention({_GIVEN}, *, {_OPTIONS}) -> (Tensor buffer, Tensor workspace)"
OUT_SCHEMA = (
    f"plan_attention_out({_GIVEN}, Tensor(a!) buffer, Tensor(b!) workspace, *, {_OPTIONS}) -> ()"
)


def plan_through_library(
    kv_lens: Tensor, cu_q_lens: Tensor | None, given: PlanNumbers, out: Any, check_it: bool,
    num_sms: Any,
) -> Plan:  # fmt: skip
    """By torch's dispatcher: under torch.compile, modes and transforms, for tensor subclasses."""
    shape = shape_of_plan(kv_lens, cu_q_lens, given)
    budget = _budget(kv_lens, num_sms)
    if out is not None:
        check_refill(out, shape, budget, kv_lens.device)
        torch.ops.smkern.plan_attention_out(
            kv_lens, cu_q_lens, out.buffer, out.workspace, numbers=out.numbers, check=check_it
        )
        return out
    numbers = Plan(shape, budget, kv_lens, kv_lens).numbers
    buffer, workspace = torch.ops.smkern.plan_attention(
        kv_lens, cu_q_lens, numbers=numbers, check=check_it
    )
    return Plan(shape, budget, buffer, workspace)


def _budget(kv_lens: Tensor, num_sms: Any) -> Budget:
    """The call's budget; of a count only that counts, as the stream is known when it runs."""
    if num_sms is None and kv_lens.is_cuda:
        return eager_plans(kv_lens.get_device()).stream_budget()
    if num_sms is None:
        return host_budget(None)
    return Budget(checks.as_num_sms(num_sms), "grid", True)


def _given(shape: AttentionShape) -> PlanNumbers:
    return PlanNumbers(
        shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.page_size, shape.max_q_len,
        shape.max_kv_len, shape.causal, shape.window or None, shape.max_tokens, shape.max_total_kv,
    )  # fmt: skip


def _run(kv_lens: Tensor, cu_q_lens: Tensor | None, plan: Plan, check_it: bool) -> None:
    """Fill a plan's buffers; those given by a graph may be of its own."""
    plan_here(kv_lens, cu_q_lens, _given(plan.shape), plan, check_it, plan.budget.num_sms)


def _plan(kv_lens, cu_q_lens=None, *, numbers, check=False):
    named = plan_from_numbers(numbers, kv_lens, kv_lens)
    plan = empty_plan(named.shape, named.budget, kv_lens.device)
    _run(kv_lens, cu_q_lens, plan, check)
    return plan.buffer, plan.workspace


def _plan_out(kv_lens, cu_q_lens, buffer, workspace, *, numbers, check=False):
    _run(kv_lens, cu_q_lens, plan_from_numbers(numbers, buffer, workspace), check)


def _fake(kv_lens, cu_q_lens=None, *, numbers, check=False):
    torch._check(kv_lens.dim() == 1, lambda: "kv_lens must be a vector")
    named = plan_from_numbers(numbers, kv_lens, kv_lens)
    plan = empty_plan(named.shape, named.budget, kv_lens.device)
    return plan.buffer, plan.workspace


def _fake_out(kv_lens, cu_q_lens, buffer, workspace, *, numbers, check=False):
    torch._check(kv_lens.dim() == 1, lambda: "kv_lens must be a vector")


LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
define(LIBRARY, SCHEMA, _plan, _fake)
define(LIBRARY, OUT_SCHEMA, _plan_out, _fake_out)
