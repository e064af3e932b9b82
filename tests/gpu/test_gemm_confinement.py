"""GEMM CTAs stay on their SMs: seen by %smid, by mask and by grid, eagerly and replayed."""

from __future__ import annotations

import pytest
import torch

from smkern.tuning.config import STREAM_K, Budget, GemmConfig
from tests.gpu.confinement import check_dispatched, replay_product
from tests.gpu.gemm_support import Case, check, operands, precompile_all
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


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_the_mask_confines_every_cta(ladder, config):
    x = operands(CASE)
    for decode in (16, 40):
        split = ladder.split(decode=decode)
        for partition in (split.decode, split.prefill):
            budget = Budget(partition.num_sms, "mask", partition.clusters)
            traced = Traced(CASE.problem, config, budget)
            torch.cuda.synchronize()
            traced.launch(x.a, x.w, x.out, partition.raw_stream)
            seen = traced.smids()
            assert set(seen) <= set(partition.smids)
            tiles = -(-CASE.m // config.block_m) * -(-CASE.n // config.block_n)
            assert len(seen) >= min(partition.num_sms, tiles) * 0.5
            if config.ctas_per_sm > 1 and decode == 16 and partition is split.decode:
                assert sum(seen.values()) > len(seen), "several CTAs an SM"
            check(CASE, x)


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_the_mask_confines_a_replayed_graph(ladder, config):
    x = operands(CASE)
    replay_product(ladder, CASE.problem, config, x)
    check(CASE, x)


@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_the_grid_caps_the_sms(config, num_sms):
    x = operands(CASE)
    traced = Traced(CASE.problem, config, Budget(num_sms, "grid"))
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        traced.launch(x.a, x.w, x.out, stream)
        seen = traced.smids()
        assert sum(seen.values()) <= num_sms
        check(CASE, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        traced.launch(x.a, x.w, x.out, torch.cuda.current_stream().cuda_stream)
    graph.replay()
    assert len(set(traced.smids())) <= num_sms


def test_a_grid_budget_inside_a_partition(ladder):
    """Below the partition's count: inside its SMs, and on no more than the budget."""
    x = operands(CASE)
    partition = ladder.split(decode=40).decode
    traced = Traced(CASE.problem, CONFIGS[0], Budget(24, "grid", partition.clusters))
    torch.cuda.synchronize()
    traced.launch(x.a, x.w, x.out, partition.raw_stream)
    seen = set(traced.smids())
    assert seen <= set(partition.smids)
    assert len(seen) <= 24


@pytest.mark.parametrize(("confined", "num_sms"), [("grid", 24), ("mask", 40)])
def test_every_dispatched_grid_is_within_the_budget(confined, num_sms):
    problems = (Case(m, 4096, 4096).problem for m in (1, 64, 300, 1000, 4096))
    check_dispatched(problems, Budget(num_sms, confined))
