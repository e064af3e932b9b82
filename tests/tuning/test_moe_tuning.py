"""The experts' models, choices and tuned cells."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from smkern.tuning import grouped, moe
from smkern.tuning.grouped import GROUPED_FAMILY, GroupedConfig, GroupedProblem
from smkern.tuning.moe import (
    MOE_FAMILY,
    Budget,
    MoeConfig,
    PermuteProblem,
    TopkProblem,
    UnpermuteProblem,
)
from tests.ops.conftest import FakeProfile

PROFILE: Any = FakeProfile()
SMALL = {
    "topk": TopkProblem(64, 128, 8),
    "permute": PermuteProblem(64, 8, 128, 2048),
    "unpermute": UnpermuteProblem(64, 8, 2048, residual=True),
}
EACH = pytest.mark.parametrize("problem", SMALL.values(), ids=SMALL)
GATE_UP = GroupedProblem(512, 128, 768, 2048, swiglu=True)
DOWN = GroupedProblem(512, 128, 2048, 768)
BOTH = pytest.mark.parametrize("problem", [GATE_UP, DOWN], ids=["gate-up", "down"])
WHOLE = Budget(132, "mask", True)


def test_bytes() -> None:
    assert SMALL["topk"].bytes_moved == 64 * (128 * 2 + 8 * 8)
    assert SMALL["permute"].bytes_moved == 64 * (2048 * 2 * 9 + 8 * 8)
    assert SMALL["unpermute"].bytes_moved == 64 * (2048 * 2 * 10 + 8 * 8)
    one = replace(GATE_UP, num_experts=1)
    assert one.bytes_moved == 2 * (2 * 768 * 2048 + 512 * (768 + 2048))
    assert 120 < GATE_UP.active < 128
    assert replace(GATE_UP, rows=8).active < 8


@EACH
@pytest.mark.parametrize("tokens", [1, 16, 200, 5000])
@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_small_choices(problem: Any, tokens: int, confined: Any) -> None:
    problem = replace(problem, tokens=tokens)
    times = []
    for num_sms in (8, 16, 32, 64, 132):
        budget = Budget(num_sms, confined)
        config = MOE_FAMILY.choose(problem, budget, PROFILE)
        assert MOE_FAMILY.is_legal(problem, config, budget, PROFILE)
        assert MOE_FAMILY.is_legal(problem, replace(config, pdl=False), budget, PROFILE)
        ctas = moe.num_ctas(problem, config, budget)
        assert 1 <= ctas <= num_sms * (config.ctas_per_sm if confined == "mask" else 1)
        times.append(moe.predict_us(problem, config, budget, PROFILE))
        assert config.counted in moe.ways(problem)
    assert all(b <= a * 1.001 for a, b in pairwise(times))


def test_few_choices_are_compared_and_many_counted() -> None:
    base = SMALL["permute"]
    assert moe.ways(replace(base, tokens=128)) == (False,)
    assert moe.ways(replace(base, tokens=500)) == (False, True)
    assert moe.ways(replace(base, tokens=1024)) == (True,)
    assert moe.ways(SMALL["topk"]) == (False,)
    config = MOE_FAMILY.choose(replace(base, tokens=8192), WHOLE, PROFILE)
    assert config.counted
    assert not MOE_FAMILY.is_legal(replace(base, tokens=8), MoeConfig(counted=True), WHOLE, PROFILE)


@pytest.mark.parametrize("experts", [1, 6, 128, 512])
@pytest.mark.parametrize("top_k", [1, 3, 8, 32])
@pytest.mark.parametrize("warps", moe.WARPS)
def test_tables_fit_registers(experts: int, top_k: int, warps: int) -> None:
    problem = PermuteProblem(4096, top_k, experts, 2048)
    config = MoeConfig(warps, counted=True)
    tokens = moe.group_tokens(problem, config)
    slots = tokens * moe.power_of_two(top_k)
    assert tokens & (tokens - 1) == 0
    assert slots * moe.power_of_two(experts) <= max(moe.table_elements(config), 32 * 512)


@pytest.mark.parametrize("block", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [8, 512, 5000, 40_000])
def test_expected_tiles_are_those_of_random_rows(rows: int, block: int) -> None:
    chance = random.Random(rows)
    total = 0
    for _ in range(5):
        counts = [0] * 128
        for _ in range(rows):
            counts[chance.randrange(128)] += 1
        total += sum(-(-count // block) for count in counts)
    assert grouped.row_tiles(rows, 128, block) == pytest.approx(total / 5, rel=0.08)


@BOTH
@pytest.mark.parametrize("rows", [1, 8, 64, 512, 1024, 4096, 16_384, 65_536])
@pytest.mark.parametrize("num_sms", [8, 16, 48, 132])
def test_grouped_choices(problem: GroupedProblem, rows: int, num_sms: int) -> None:
    problem = replace(problem, rows=rows)
    for confined in ("mask", "grid"):
        budget = Budget(num_sms, confined)  # type: ignore[arg-type]
        config = GROUPED_FAMILY.choose(problem, budget, PROFILE)
        assert GROUPED_FAMILY.is_legal(problem, config, budget, PROFILE)
        ctas = grouped.num_ctas(problem, config, budget)
        assert ctas <= num_sms * (config.ctas_per_sm if confined == "mask" else 1)
        assert config.swap or rows > 2048
    # few rows wait for weights: small tiles; many for the tensor cores: large ones
    if rows <= 512:
        assert config.block_m == 16
    if rows >= 65_536 and num_sms == 132:
        assert config.block_m * config.block_n * problem.halves == 32_768
    if rows == 16_384 and num_sms == 132:
        assert config.tails, "of 128 rows an expert a third would be padding"


def test_grouped_kernels_of_other_devices() -> None:
    for capability, aligned in ((80, True), (89, True), (100, True), (90, False)):
        problem = replace(GATE_UP, aligned=aligned)
        device: Any = FakeProfile(divmod(capability, 10))
        config = GROUPED_FAMILY.choose(problem, WHOLE, device)
        assert config.kernel == "pointer"
        assert not grouped.is_legal(problem, GroupedConfig("ws", 16, 64, 128), capability)


def test_most_tiles_bound_any_deal() -> None:
    chance = random.Random(3)
    for _ in range(200):
        experts, rows = chance.choice([1, 8, 128]), chance.randrange(1, 2000)
        problem = GroupedProblem(rows, experts, 768, 64)
        config = GroupedConfig("ws", chance.choice([16, 64, 128]), 64, 64)
        cuts = sorted(chance.randrange(rows + 1) for _ in range(experts - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        tiles = sum(-(-count // config.block_m) for count in counts) * 12
        assert tiles <= grouped.most_tiles(problem, config)
