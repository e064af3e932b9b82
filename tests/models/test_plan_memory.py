"""Memory of attention's plans: exact where it is reserved, kept where it is outgrown."""

from __future__ import annotations

import torch

from smkern.device import Budget
from smkern.models.plan_memory import SEGMENT, PlanMemory
from smkern.ops.attention.plan import plan_sizes
from smkern.tuning.attention.shapes import AttentionShape


def shape(batch: int, context: int) -> AttentionShape:
    return AttentionShape(batch, 32, 8, 128, 16, 1, context, batch, batch * context)


def test_what_is_reserved_is_hardly_more_than_asked():
    memory = PlanMemory(torch.device("cpu"))
    memory.reserve(shape(256, 4096))
    words, num_bytes = plan_sizes(shape(256, 4096))
    reserved = memory.num_bytes
    assert 4 * words + num_bytes <= reserved < 4 * words + num_bytes + SEGMENT
    for batch in (256, 16, 1):
        plan = memory.plan(shape(batch, 4096), Budget(16))
        assert plan.workspace_bytes == plan_sizes(shape(batch, 4096))[1]
    memory.reserve(shape(16, 2048))
    assert memory.num_bytes == reserved


def test_what_is_outgrown_stays():
    memory = PlanMemory(torch.device("cpu"))
    small = memory.plan(shape(8, 2048), Budget(16))
    before = memory.num_bytes
    memory.reserve(shape(64, 2048))
    assert memory.num_bytes >= before + sum(plan_sizes(shape(64, 2048)))
    assert any(small.workspace.data_ptr() == x.data_ptr() for x in memory._outgrown)
