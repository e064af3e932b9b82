"""Attention within a budget of a partition, and beside neighbours that never end.

`tests/gpu/test_confinement.py` has its launches among all operators.
"""

from __future__ import annotations

import pytest
import torch

from smkern.device import Budget
from tests.gpu.attention.cases import make_step
from tests.gpu.attention.support import attend, make_plan
from tests.gpu.attention.traced import CASES, RUNS
from tests.gpu.attention.truth import check
from tests.gpu.confinement import check_masked
from tests.gpu.gemm_support import Holder, finishes


@pytest.mark.parametrize("traced", RUNS.values(), ids=RUNS)
def test_a_grid_budget_inside_a_partition(ladder, traced):
    """Below the partition's count: inside its SMs, and in no more CTAs than the budget."""
    partition = ladder.split(decode=40).decode
    run = traced(Budget(24, "grid", partition.clusters))
    seen = check_masked(run, partition)
    assert sum(seen.values()) <= 24 * run.launches + run.plans


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_sms", [None, 24])
def test_a_spinning_neighbour_does_not_hold_a_step_up(ladder, case, num_sms):
    """Every SM outside the partition is taken: what ends can only have run inside."""
    holder = Holder()
    split = ladder.split(decode=40)
    step = make_step(case)
    torch.cuda.synchronize()
    with split.decode:
        plan = make_plan(step, num_sms=num_sms)
        attend(step, plan=plan, num_sms=num_sms)
    split.decode.synchronize()
    step.poison_outputs()
    torch.cuda.synchronize()
    with holder.hold(split.prefill.stream, split.prefill.num_sms):
        with split.decode:
            make_plan(step, out=plan, num_sms=num_sms)
            attend(step, plan=plan, num_sms=num_sms)
        assert finishes(split.decode.stream, 2.0), "the step waits for SMs outside its partition"
    check(step)
    del plan
