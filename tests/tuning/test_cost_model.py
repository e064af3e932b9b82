"""The time model: bounds, monotony, and its constants as data."""

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.tuning import candidates, constraints
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS, CostConstants, variant_key
from smkern.tuning.cost_model import Ceilings, Estimate, predict_us, streamed_tiles

SM_90 = (9, 0)
sizes = st.integers(1, 8192)
some_variants = st.sampled_from(candidates.variants("bf16", True, SM_90))


@given(sizes, sizes, sizes, some_variants, st.integers(1, 131), st.sampled_from(["mask", "grid"]))
def test_launches_apart_are_never_slower_on_more_sms(profile, m, n, k, config, num_sms, confined):
    problem, config = GemmProblem(m, n, k), replace(config, overlap=False)
    few = predict_us(problem, config, Budget(num_sms, confined), profile)
    more = predict_us(problem, config, Budget(num_sms + 1, confined), profile)
    assert more <= few * (1 + 1e-9)


@pytest.mark.parametrize(("num_sms", "overlaps"), [(64, True), (112, False), (128, True)])
def test_launches_overlap_where_all_of_the_next_fit_or_none(profile, num_sms, overlaps):
    """64 CTAs: on 112 SMs 48 of them begin beside those before, and take SMs unevenly."""
    problem = GemmProblem(17, 8192, 7392)
    config = GemmConfig("ws", 32, 128, 64, 4, 11, swap=True)
    estimate = Estimate(
        problem, config, Ceilings(Budget(num_sms, "mask"), profile, DEFAULTS), DEFAULTS, 1
    )
    assert estimate.tiles == 64
    assert estimate.fastest_us(1, 0)[1] is overlaps


@given(sizes, sizes, sizes, some_variants, st.integers(1, 132))
def test_bound_is_below_every_prediction(profile, m, n, k, config, num_sms):
    problem, budget = GemmProblem(m, n, k), Budget(num_sms, "mask")
    ceilings = Ceilings(budget, profile, DEFAULTS)
    estimate = Estimate(problem, config, ceilings, DEFAULTS, 8)
    bound = estimate.at_least_us()
    for split in candidates.splits(estimate.tiles, estimate.ctas, estimate.steps):
        for cap in estimate.grids(split):
            assert 0 <= cap <= estimate.ctas
            assert bound <= estimate.launch_us(split, cap)


@given(sizes, sizes, sizes, some_variants, st.integers(1, 132))
@settings(max_examples=50)
def test_prediction_is_above_the_roofline(profile, m, n, k, config, num_sms):
    problem, budget = GemmProblem(m, n, k), Budget(num_sms, "mask")
    bytes_us = problem.bytes_moved / (profile.bandwidth(num_sms) * 1e6)
    flops_us = problem.flops / (8.1e6 * num_sms)
    assert predict_us(problem, config, budget, profile) > max(bytes_us, flops_us)


def test_a_partial_wave_costs_a_wave_and_stream_k_saves_some_of_it(profile):
    """Not most: measured, its loops are out of step and read again what L2 has lost."""
    whole = GemmConfig("ws", 128, 256, 64, 8, 4)
    problem = GemmProblem(1024, 2048, 4096)
    tiles = constraints.num_tiles(problem, whole)
    exact, above = Budget(tiles, "mask"), Budget(tiles - 1, "mask")
    wave = predict_us(problem, whole, exact, profile)
    lost = predict_us(problem, whole, above, profile) - wave
    assert lost > 0.6 * wave
    streamed = predict_us(problem, replace(whole, split=0), above, profile)
    assert predict_us(problem, whole, above, profile) - streamed > 0.25 * wave


def test_a_second_cta_hides_the_epilogue(profile):
    problem, budget = GemmProblem(2048, 4096, 512), Budget(32, "mask")
    one = GemmConfig("tma", 128, 128, 64, 4, 3)
    two = GemmConfig("tma", 128, 128, 64, 4, 3, ctas_per_sm=2)
    assert predict_us(problem, two, budget, profile) < predict_us(problem, one, budget, profile)


def test_ctas_per_sm_count_only_under_a_mask(profile):
    two = GemmConfig("tma", 128, 128, 64, 4, 3, ctas_per_sm=2)
    one = GemmConfig("tma", 128, 128, 64, 4, 3)
    problem, grid = GemmProblem(2048, 4096, 512), Budget(32, "grid")
    assert predict_us(problem, two, grid, profile) == predict_us(problem, one, grid, profile)


def test_library_is_given_what_its_budget_allows(profile):
    problem, budget = GemmProblem(2048, 4096, 4096), Budget(32, "mask")
    ours = predict_us(problem, GemmConfig("ws", 128, 256, 64, 8, 4), budget, profile)
    assert 0 < predict_us(problem, constraints.CUBLASLT, budget, profile) < ours


def test_streamed_loops_read_again_what_l2_cannot_hold(profile):
    """Seen on an H200: 204 us streamed, 90 us whole; L2 holds neither weights nor distance."""
    problem, budget = GemmProblem(320, 3584, 18944), Budget(92, "mask")
    whole = GemmConfig("ws", 64, 256, 64, 4, 5, group_m=5)
    streamed = GemmConfig("ws", 64, 256, 64, 4, 5, split=0, group_m=5)
    assert constraints.num_tiles(problem, whole) < 92
    lost = predict_us(problem, streamed, budget, profile) / predict_us(
        problem, whole, budget, profile
    )
    assert lost > 1.5


def test_a_launch_that_overlaps_begins_earlier_and_has_less_of_l2(profile):
    config = GemmConfig("ws", 64, 128, 64, 4, 9)
    apart = replace(config, overlap=False)
    short, budget = GemmProblem(64, 2048, 1024), Budget(64, "mask")
    assert predict_us(short, config, budget, profile) < predict_us(short, apart, budget, profile)
    long = GemmProblem(640, 2560, 16384)
    wide = Budget(104, "mask")
    assert predict_us(long, config, wide, profile) > predict_us(long, apart, wide, profile)


def test_overlap_needs_a_mask_and_ws(profile):
    problem, grid = GemmProblem(64, 2048, 1024), Budget(64, "grid")
    for config, budget in (
        (GemmConfig("ws", 64, 128, 64, 4, 9), grid),
        (GemmConfig("tma", 64, 128, 64, 4, 9), Budget(64, "mask")),
    ):
        apart = replace(config, overlap=False)
        assert predict_us(problem, config, budget, profile) == predict_us(
            problem, apart, budget, profile
        )


def test_constants_and_variants_come_from_data():
    data = {"constants": {"launch_us": 3, "tile_us": 0.25}, "variants": {"ws:a": [0.5, -0.5]}}
    constants = CostConstants.from_json(data)
    assert (constants.launch_us, constants.tile_us) == (3.0, 0.25)
    assert constants.step_us == DEFAULTS.step_us
    assert constants.variants == {"ws:a": (0.5, -0.5)}
    with pytest.raises(KeyError, match=r"unknown cost constants.*lunch_us"):
        CostConstants.from_json({"constants": {"lunch_us": 3}, "variants": {}})


def test_a_variant_that_was_never_good_is_not_known(profile):
    good, other = GemmConfig("ws", 64, 128, 64, 4, 9), GemmConfig("ws", 64, 64, 64, 4, 12)
    known = replace(DEFAULTS, variants={variant_key(good): (0.1, 0.2)})
    assert known.knows(good)
    assert not known.knows(other)
    assert known.knows(GemmConfig("pointer", 64, 64, 64))
    assert DEFAULTS.knows(other)
    problem, budget = GemmProblem(64, 2048, 1024), Budget(64, "mask")
    ratio = predict_us(problem, good, budget, profile, known) / predict_us(
        problem, good, budget, profile
    )
    assert ratio == pytest.approx(exp(0.1))


@given(st.integers(1, 3000), st.integers(1, 264))
def test_stream_k_leaves_whole_waves_and_cuts_few_pieces(tiles, ctas):
    streamed = streamed_tiles(tiles, ctas)
    assert (tiles - streamed) % ctas == 0
    assert streamed < 2 * ctas
    if tiles > ctas and streamed:
        assert ctas <= 4 * streamed, "a tile must not be cut into more than about four pieces"
