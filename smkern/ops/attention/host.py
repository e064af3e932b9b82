"""Attention on CPU tensors: the checks of the GPU path, then the reference in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.kernels.attention.args import WorkspaceLayout
from smkern.kernels.attention.items import plan_items
from smkern.ops import checks
from smkern.ops.attention import check
from smkern.ops.attention.call import Call, check_call
from smkern.ops.attention.eager import check_aliases
from smkern.ops.attention.plan import (
    Plan,
    PlanNumbers,
    check_place,
    check_refill,
    empty_plan,
    shape_of_plan,
)
from smkern.ops.reference import attention as reference
from smkern.tuning.attention.shapes import Budget


def host_budget(num_sms: Any) -> Budget:
    """The budget of a call on CPU tensors: what it says, 1 where it says nothing."""
    return Budget(1 if num_sms is None else checks.as_num_sms(num_sms), "grid", True)


def attention_cpu(call: Call) -> tuple[Tensor, Tensor | None]:
    """The reference, with the checks that the GPU path makes. A plan is checked and not needed."""
    shape = check_call(call)
    budget = host_budget(call.num_sms)
    if call.plan is not None:
        check_place(call.plan, budget, call.q.device, "plan")
    if call.check:
        check.check_memory(call, shape)
    if call.out is not None or call.lse is not None:
        check_aliases(call)
    with torch.no_grad():
        out, lse = reference.paged_attention(
            call.q, call.k_cache, call.v_cache, call.page_table, call.kv_lens,
            page_indptr=call.page_indptr, cu_q_lens=call.cu_q_lens, max_q_len=shape.max_q_len,
            max_kv_len=shape.max_kv_len, causal=shape.causal, scale=call.scale,
            window=call.window, softcap=call.softcap, sinks=call.sinks, k_scale=call.k_scale,
            v_scale=call.v_scale, out=call.out, lse=call.lse,
        )  # fmt: skip
    return out, lse if call.return_lse or call.lse is not None else None


def plan_cpu(
    kv_lens: Tensor, cu_q_lens: Tensor | None, given: PlanNumbers, out: Any, check_it: bool,
    num_sms: Any,
) -> Plan:  # fmt: skip
    """The plan as Python makes it (`plan_items`), for CPU tensors."""
    shape = shape_of_plan(kv_lens, cu_q_lens, given)
    budget = host_budget(num_sms)
    if out is not None:
        check_refill(out, shape, budget, kv_lens.device)
    if check_it:
        check.check_lengths(kv_lens, cu_q_lens, shape)
    plan = empty_plan(shape, budget, kv_lens.device) if out is None else out
    starts = None if cu_q_lens is None else cu_q_lens.tolist()
    items = plan_items(shape, kv_lens.tolist(), starts, budget.num_sms)
    plan.buffer.copy_(torch.from_numpy(items))
    plan.workspace[: WorkspaceLayout.of(shape).decode_out].zero_()
    if check_it:
        check.check_plan(plan)
    return plan
