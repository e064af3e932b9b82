"""Configurations over rows: what there is, what is legal, what the model and the table choose."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from smkern.errors import BudgetError
from smkern.profile import load_profile
from smkern.tuning.cells import Cells, Tuned
from smkern.tuning.rows import (
    MAX_HELD,
    ROWS,
    WARPS_PER_SM,
    WHOLE,
    Budget,
    RowsConfig,
    RowsKey,
    RowsProblem,
    candidates,
    held,
    num_ctas,
    num_items,
    pieces,
    predict_us,
    shapes_of,
)

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
            assert ROWS.is_legal(problem, config, budget, PROFILE)
            assert ROWS.is_legal(problem, replace(config, pdl=False), budget, PROFILE)
    assert not ROWS.is_legal(problem, RowsConfig(3), MASK, PROFILE)


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
    one = ROWS.choose(replace(problem, rows=1), Budget(132, "mask"), PROFILE)
    many = ROWS.choose(replace(problem, rows=8192), Budget(16, "mask"), PROFILE)
    assert held(problem, one) <= held(problem, many)
    assert many.ctas_per_sm * many.num_warps >= 8
    times = []
    for num_sms in (8, 16, 32, 48, 64, 132):
        budget = Budget(num_sms, "mask")
        large = replace(problem, rows=8192)
        config = ROWS.choose(large, budget, PROFILE)
        times.append(predict_us(large, config, budget, PROFILE))
        floor = large.bytes_moved / (1e6 * PROFILE.bandwidth(num_sms))
        assert times[-1] > floor
    assert all(x >= 0.999 * y for x, y in pairwise(times))


def test_a_cell_serves_its_neighbours() -> None:
    tuned = RowsConfig(8, 1, 3)
    key = RowsKey.of(replace(BASE, rows=60), MASK)
    table = ROWS.table_of(Cells({}, {key: Tuned(tuned, 3.0)}))
    for rows, wanted in ((64, tuned), (20, tuned), (256, tuned), (8, None), (1024, None)):
        assert ROWS.lookup(replace(BASE, rows=rows), MASK, PROFILE, table) == wanted
    assert ROWS.lookup(BASE, Budget(32, "grid"), PROFILE, table) is None
    assert ROWS.lookup(replace(BASE, width=5120), MASK, PROFILE, table) is None
    assert ROWS.config(BASE, MASK, PROFILE, table) == tuned
    assert ROWS.config(BASE, MASK, PROFILE) == ROWS.choose(BASE, MASK, PROFILE)
    with pytest.raises(BudgetError, match="num_sms is 0"):
        ROWS.config(BASE, Budget(0, "mask"), PROFILE)


def test_an_illegal_cell_is_passed_over() -> None:
    key = RowsKey.of(BASE, MASK)
    table = ROWS.table_of(Cells({}, {key: Tuned(RowsConfig(32, 1, 16), 3.0)}))
    assert ROWS.lookup(BASE, MASK, PROFILE, table) is None


def test_lines_and_a_missing_file() -> None:
    key, cell = RowsKey.of(BASE, MASK), Tuned(RowsConfig(8, 1, 2, 2, False), 4.25)
    assert ROWS.codec.decode(ROWS.codec.encode(key, cell)) == (key, cell)
    assert not ROWS.load("NVIDIA Nothing").cells
