"""GEMM CTAs stay on their SMs: seen by %smid, by mask and by grid, eagerly and replayed."""

from __future__ import annotations

import pytest

from smkern.tuning.config import STREAM_K, Budget, GemmConfig
from tests.gpu import gemm_support
from tests.gpu.confinement import check_capped, check_dispatched, check_masked, check_replayed
from tests.gpu.gemm_support import Case, precompile_all
from tests.gpu.gemm_trace import Traced

CASE = Case(1000, 1032, 1096)
CONFIGS = [
    GemmConfig("tma", 64, 64, 64, 4, 4, ctas_per_sm=3),
    GemmConfig("tma", 64, 128, 64, 4, 3, ctas_per_sm=2, split=STREAM_K),
    GemmConfig("ws", 128, 128, 64, 8, 4),
    GemmConfig("pointer", 64, 64, 64, 4, 3, ctas_per_sm=2, split=3),
]


def _name(config: GemmConfig) -> str:
    return f"{config.kernel}-{config.ctas_per_sm}-{config.split}"


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile_all((CASE.problem, config) for config in CONFIGS)


def traced(config: GemmConfig, budget: Budget) -> Traced:
    return Traced(gemm_support, CASE, config, budget)


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_the_mask_confines_every_cta(ladder, config):
    tiles = -(-CASE.m // config.block_m) * -(-CASE.n // config.block_n)
    for decode in (16, 40):
        split = ladder.split(decode=decode)
        for partition in (split.decode, split.prefill):
            seen = check_masked(traced(config, partition.budget), partition)
            assert len(seen) >= min(partition.num_sms, tiles) * 0.5
            if config.ctas_per_sm > 1 and decode == 16 and partition is split.decode:
                assert sum(seen.values()) > len(seen), "several CTAs an SM"


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_the_mask_confines_a_replayed_graph(ladder, config):
    partition = ladder.split(decode=16).decode
    check_replayed(traced(config, partition.budget), partition)


@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_the_grid_caps_the_sms(config, num_sms):
    check_capped(traced(config, Budget(num_sms, "grid")), num_sms)


def test_a_grid_budget_inside_a_partition(ladder):
    """Below the partition's count: inside its SMs, and on no more than the budget."""
    partition = ladder.split(decode=40).decode
    run = traced(CONFIGS[0], Budget(24, "grid", partition.clusters))
    assert len(check_masked(run, partition)) <= 24


@pytest.mark.parametrize(("confined", "num_sms"), [("grid", 24), ("mask", 40)])
def test_every_dispatched_grid_is_within_the_budget(confined, num_sms):
    problems = (Case(m, 4096, 4096).problem for m in (1, 64, 300, 1000, 4096))
    check_dispatched(problems, Budget(num_sms, confined))
