"""The sampler's sizes, grids, choices and model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.tuning.sample import (
    MAX_VOCAB,
    RESIDENT_WARPS,
    SAMPLE_FAMILY,
    WARPS,
    Budget,
    Grid,
    SampleConfig,
    SampleProblem,
    candidates,
    grid_of,
    predict_us,
    workspace_bytes,
)
from tests.ops.conftest import FakeProfile

BASE = SampleProblem(128, 151_936)
PROFILE = FakeProfile()


def test_sizes():
    assert (BASE.piece, BASE.pieces, BASE.groups) == (2048, 75, 2400)
    assert BASE.bytes_moved == 128 * 151_936 * 2
    wide = SampleProblem(1, MAX_VOCAB, "fp32")
    assert (wide.piece, wide.pieces, wide.groups) == (1024, 256, 8192)
    assert wide.groups < 1 << 16, "groups are listed by 16 bits"
    assert workspace_bytes(BASE) == 65_536 + 4 * 128 * (2400 + 75)


@pytest.mark.parametrize("rows", [1, 2, 31, 128, 512])
@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_the_grid_keeps_the_budget_and_leaves_no_row_out(rows, confined):
    for sms in (1, 16, 132):
        for vocab in (5, 30_000, 151_936):
            problem, budget = replace(BASE, rows=rows, vocab=vocab), Budget(sms, confined)
            for config in candidates(problem, budget):
                assert SAMPLE_FAMILY.is_legal(problem, config, budget, PROFILE)
                assert config.num_warps * config.ctas_per_sm <= RESIDENT_WARPS
                grid = grid_of(problem, config, budget)
                most = sms * (config.ctas_per_sm if confined == "mask" else 1)
                assert 1 <= grid.num_ctas <= min(most, rows * problem.pieces)
                if grid.per_row:
                    assert grid.num_ctas == rows * grid.per_row
                    assert grid.per_row <= problem.pieces
                else:
                    assert grid.num_ctas < rows
    assert grid_of(replace(BASE, rows=1), SampleConfig(16, 2), Budget(132, "mask")) == Grid(75, 75)


def test_choices():
    grid = Budget(16, "grid")
    apart = SampleConfig(16, 2, pdl=False)
    assert SAMPLE_FAMILY.is_legal(BASE, apart, Budget(16, "mask"), PROFILE)
    assert not SAMPLE_FAMILY.is_legal(BASE, apart, grid, PROFILE), (
        "one CTA an SM where no mask confines"
    )
    assert SAMPLE_FAMILY.choose(BASE, grid, PROFILE).num_warps == max(WARPS), (
        "one CTA an SM wants warps"
    )


def test_more_rows_take_longer_and_more_sms_do_not():
    config = SampleConfig(16, 2)
    for confined in ("mask", "grid"):
        times = [
            predict_us(replace(BASE, rows=rows), config, Budget(16, confined), PROFILE)
            for rows in (1, 32, 128, 512)
        ]
        assert times == sorted(times)
        times = [
            predict_us(BASE, config, Budget(sms, confined), PROFILE) for sms in (132, 48, 16, 8)
        ]
        assert times == sorted(times)
