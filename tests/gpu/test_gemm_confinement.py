"""GEMM CTAs fill the SMs that they stay on, and dispatch keeps to budgets.

`test_confinement.py` has them in graphs and grids, among all operators.
"""

from __future__ import annotations

import pytest

from smkern.tuning.config import Budget
from tests.gpu.confinement import check_dispatched, check_masked
from tests.gpu.gemm_support import Case
from tests.gpu.gemm_trace import GEMM_CASE, GEMMS, name_of, traced_gemm


@pytest.mark.parametrize("config", GEMMS, ids=name_of)
def test_a_partition_is_filled(ladder, config):
    tiles = -(-GEMM_CASE.m // config.block_m) * -(-GEMM_CASE.n // config.block_n)
    for decode in (16, 40):
        split = ladder.split(decode=decode)
        for partition in (split.decode, split.prefill):
            seen = check_masked(traced_gemm(config, partition.budget), partition)
            assert len(seen) >= min(partition.num_sms, tiles) * 0.5
            if config.ctas_per_sm > 1 and decode == 16 and partition is split.decode:
                assert sum(seen.values()) > len(seen), "several CTAs an SM"


def test_a_grid_budget_inside_a_partition(ladder):
    """Below the partition's count: inside its SMs, and on no more than the budget."""
    partition = ladder.split(decode=40).decode
    run = traced_gemm(GEMMS[0], Budget(24, "grid", partition.clusters))
    assert len(check_masked(run, partition)) <= 24


@pytest.mark.parametrize(("confined", "num_sms"), [("grid", 24), ("mask", 40)])
def test_every_dispatched_grid_is_within_the_budget(confined, num_sms):
    problems = (Case(m, 4096, 4096).problem for m in (1, 64, 300, 1000, 4096))
    check_dispatched(problems, Budget(num_sms, confined))
