"""Configurations over rows: what there is, what is legal, what the model and the table choose."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from smkern.errors import BudgetError
from smkern.profile import load_profile, profile_for
from smkern.tuning.constraints import ctas_fit
from smkern.tuning.rows import (
    MAX_HELD,
    WARPS_PER_SM,
    WHOLE,
    Budget,
    RowsProblem,
    candidates,
    choose,
    held,
    memory_us,
    num_ctas,
    num_items,
    pieces,
    predict_us,
    shapes_of,
    shared_bytes,
)
from tests import gpus

OPS = ("rms_norm", "add_rms_norm", "silu_and_mul", "embedding")
EACH = pytest.mark.parametrize("op", OPS)
BASE = RowsProblem("add_rms_norm", 64, 4096)
MASK = Budget(32, "mask")
PROFILE = load_profile("h200")


@pytest.mark.parametrize("width", [1, 256, 257, 1000, 2880, 4096, 5120, 7168, 12288, 16384])
@pytest.mark.parametrize("warps", [4, 8, 16, 32])
def test_pieces_cover_a_row(width: int, warps: int) -> None:
    first, rest = pieces(width, warps)
    assert (first + rest) * WHOLE >= width
    for count in (first, rest):
        assert count & (count - 1) == 0
        assert count % warps == 0
    assert first + rest < 2 * max(warps, -(-width // WHOLE))


@EACH
@pytest.mark.parametrize("width", [1, 1000, 4096, 5120, 16384])
def test_every_kind_has_configurations(op: str, width: int) -> None:
    problem = replace(BASE, op=op, width=width)
    shapes = shapes_of(problem)
    assert len(set(shapes)) == len(shapes) >= 1
    assert all(8 <= held(problem, config) <= MAX_HELD for config in shapes)
    for budget in (MASK, Budget(7, "grid")):
        found = candidates(problem, budget)
        assert {replace(x, ctas_per_sm=1) for x in found} == set(shapes)
        for config in found:
            assert config.num_warps * config.ctas_per_sm <= WARPS_PER_SM
            assert budget.confined == "mask" or config.ctas_per_sm == 1


@EACH
@pytest.mark.parametrize("info", gpus.FOREIGN, ids=gpus.by_name)
def test_all_ctas_of_an_sm_are_resident(info, op: str) -> None:
    for rows, width in product((64, 8192), (1000, 4096, 5120)):
        problem = replace(BASE, op=op, rows=rows, width=width)
        config = choose(problem, Budget(info.num_sms, "mask"), profile_for(info))
        count = config.ctas_per_sm
        assert count * config.num_warps <= (48 if info.capability[1] else 64)
        assert ctas_fit(shared_bytes(problem, config), count, info.capability)


@EACH
@pytest.mark.parametrize("rows", [1, 128, 8192])
@pytest.mark.parametrize("num_sms", [1, 16, 132])
def test_the_grid_is_within_the_budget(op: str, rows: int, num_sms: int) -> None:
    problem = replace(BASE, op=op, rows=rows)
    for confined in ("grid", "mask"):
        budget = Budget(num_sms, confined)
        for config in candidates(problem, budget):
            ctas = num_ctas(problem, config, budget)
            resident = config.ctas_per_sm if confined == "mask" else 1
            assert 1 <= ctas <= num_sms * resident
            assert ctas <= num_items(problem, config)


@EACH
def test_the_model_prefers_what_it_should(op: str) -> None:
    problem = replace(BASE, op=op)
    one = choose(replace(problem, rows=1), Budget(132, "mask"), PROFILE)
    many = choose(replace(problem, rows=8192), Budget(16, "mask"), PROFILE)
    assert held(problem, one) <= held(problem, many)
    assert many.ctas_per_sm * many.num_warps >= 8
    times = []
    for num_sms in (8, 16, 32, 48, 64, 132):
        budget = Budget(num_sms, "mask")
        large = replace(problem, rows=8192)
        config = choose(large, budget, PROFILE)
        times.append(predict_us(large, config, budget, memory_us(large, budget, PROFILE)))
        floor = large.bytes_moved / (1e6 * PROFILE.bandwidth(num_sms))
        assert times[-1] > floor
    assert all(x >= 0.999 * y for x, y in pairwise(times))


def test_no_budget() -> None:
    with pytest.raises(BudgetError, match="num_sms is 0"):
        choose(BASE, Budget(0, "mask"), PROFILE)
