"""The model's account of a step: floors, monotony, the deal, and what the lengths change."""

from dataclasses import replace
from itertools import pairwise

import pytest

from smkern.tuning.attention import constraints
from smkern.tuning.attention.model import CUDA, _blended, estimate, predict_us, tile_us
from smkern.tuning.attention.shapes import (
    DECODE_PIECE,
    AttentionConfig,
    AttentionProblem,
    AttentionShape,
    Budget,
)
from tests.tuning.attention_steps import decode_of

SMS = (16, 24, 32, 48, 64, 84, 100, 116, 132)


def prefill_of(batch, q_len, length, **changes):
    shape = AttentionShape(batch, 32, 8, 128, 16, q_len, length, batch * q_len, batch * length)
    return AttentionProblem(replace(shape, **changes))


STEPS = {
    "64 x 4096": decode_of(64, 4096),
    "8 x 1024": decode_of(8, 1024),
    "4 x 128k": decode_of(4, 131072),
    "1 x 8192 new": prefill_of(1, 8192, 8192),
    "16 x 512 new": prefill_of(16, 512, 512),
    "2048 on 30k": prefill_of(1, 2048, 32768),
    "mixed": prefill_of(64, 2048, 4096, max_tokens=2111),
}


def of(problem, num_sms, profile, kernel="cuda", confined="mask", **options):
    config = constraints.default_config(problem, kernel)
    if confined == "grid":
        config = replace(config, ctas_per_sm=1)
    return estimate(problem, config, Budget(num_sms, confined), profile, **options)


@pytest.mark.parametrize("kernel", constraints.AVAILABLE)
@pytest.mark.parametrize("step", STEPS)
def test_never_below_the_floor_and_hardly_slower_on_more_sms(step, kernel, profile):
    times = []
    for num_sms in SMS:
        found = of(STEPS[step], num_sms, profile, kernel)
        assert found.predicted_us > found.floor_us > 0
        times.append(found.predicted_us)
    assert all(more <= 1.02 * fewer for fewer, more in pairwise(times)), times
    assert times[-1] < times[0] / 1.5


def test_decode_is_bound_by_memory_and_prefill_by_work(profile):
    assert of(STEPS["64 x 4096"], 132, profile).bound == "memory"
    assert of(STEPS["1 x 8192 new"], 100, profile).bound == "work"


def test_counts(profile):
    found = of(STEPS["64 x 4096"], 16, profile)
    units = 64 * 8 * (4096 // (2 * DECODE_PIECE))
    assert (found.decode_units, found.prefill_units) == (units, 0)
    assert (found.ctas, found.workers) == (16, 48)
    mixed = of(STEPS["mixed"], 16, profile)
    assert mixed.decode_units == units // 64 * 63
    assert mixed.prefill_units == 2048 * 4 // 128 * 8


def test_short_contexts_cost_less_than_the_shapes_bound(profile):
    problem = decode_of(32, 30_000)
    typical = of(problem, 48, profile, kv_lens=[200, 500, 1000, 2000, 8000, 30_000])
    assert typical.predicted_us < 0.4 * of(problem, 48, profile).predicted_us


def test_skew_costs_little_because_pieces_are_dealt(profile):
    even = of(decode_of(32, 6950), 32, profile)
    skewed = of(decode_of(32, 30_000), 32, profile, kv_lens=[200, 500, 1000, 2000, 8000, 30_000])
    rates = [item.bytes_moved / item.predicted_us for item in (even, skewed)]
    assert rates[1] > 0.93 * rates[0]


def test_an_fp8_cache_moves_half_the_bytes(profile):
    wide = decode_of(64, 4096)
    narrow = replace(wide, cache_dtype="fp8")
    assert of(narrow, 132, profile).bytes_moved < 0.51 * of(wide, 132, profile).bytes_moved
    assert of(narrow, 132, profile).predicted_us < of(wide, 132, profile).predicted_us


def test_a_window_costs_its_keys_only(profile):
    full, narrow = prefill_of(1, 8192, 8192), prefill_of(1, 8192, 8192, window=1024)
    assert of(narrow, 132, profile).predicted_us < 0.4 * of(full, 132, profile).predicted_us


def test_a_grid_budget_has_one_cta_an_sm(profile):
    problem = STEPS["64 x 4096"]
    mask = of(problem, 16, profile, "triton")
    grid = of(problem, 16, profile, "triton", "grid")
    assert (mask.ctas, grid.ctas) == (64, 16)
    assert grid.predicted_us > mask.predicted_us


@pytest.mark.parametrize("batch", [0, 3])
def test_nothing_to_do_costs_a_launch(batch, profile):
    shape = AttentionShape(batch, 32, 8, 128, 16, 1, 0, batch, 0)
    found = predict_us(AttentionProblem(shape), AttentionConfig(), Budget(16), profile)
    assert CUDA.launch_us <= found < 10


def test_many_prefill_units_are_dealt_evenly(profile):
    """Above the count that is dealt one by one, the time is about the same."""
    problem = prefill_of(64, 512, 512)
    one, many = of(problem, 132, profile), of(prefill_of(256, 512, 512), 132, profile)
    assert many.predicted_us == pytest.approx(4 * one.predicted_us, rel=0.1)


def test_a_tile_takes_longer_than_its_products(profile):
    products = 4 * 128 * 128 * 128 / 4096 / 1980
    assert products < tile_us(STEPS["1 x 8192 new"], CUDA, profile.info) < 3 * products


def test_blending():
    assert _blended([0.0, 0.0], 6.0) == 0.0
    assert 10.0 < _blended([10.0, 5.0], 6.0) < 10.1
