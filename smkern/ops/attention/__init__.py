"""Paged attention: plan, attention, merge of states."""

from smkern.ops.attention.explain import AttentionExplanation, explain_attention
from smkern.ops.attention.merge import merge_states
from smkern.ops.attention.paged import paged_attention, plan_attention
from smkern.ops.attention.plan import Plan
from smkern.ops.attention.warmup import AttentionCalls

__all__ = [
    "AttentionCalls",
    "AttentionExplanation",
    "Plan",
    "explain_attention",
    "merge_states",
    "paged_attention",
    "plan_attention",
]
