"""The time model: bounds, monotony, and its constants as data."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.tuning import space
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.cost_model import DEFAULTS, Ceilings, CostConstants, Estimate, predict_us

SM_90 = (9, 0)
sizes = st.integers(1, 8192)
some_variants = st.sampled_from(space.variants("bf16", True, SM_90))


@given(sizes, sizes, sizes, some_variants, st.integers(1, 131), st.sampled_from(["mask", "grid"]))
def test_whole_loops_are_never_slower_on_more_sms(profile, m, n, k, config, num_sms, confined):
    problem = GemmProblem(m, n, k)
    few = predict_us(problem, config, Budget(num_sms, confined), profile)
    more = predict_us(problem, config, Budget(num_sms + 1, confined), profile)
    assert more <= few * (1 + 1e-9)


@given(sizes, sizes, sizes, some_variants, st.integers(1, 132))
def test_bound_is_below_every_prediction(profile, m, n, k, config, num_sms):
    problem, budget = GemmProblem(m, n, k), Budget(num_sms, "mask")
    ceilings = Ceilings(budget, profile, DEFAULTS)
    estimate = Estimate(problem, config, ceilings, DEFAULTS, 8)
    bound = estimate.at_least_us()
    for split in space.splits(estimate.tiles, estimate.ctas, estimate.steps):
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


def test_a_partial_wave_costs_a_wave_and_stream_k_saves_most_of_it(profile):
    whole = GemmConfig("ws", 128, 256, 64, 8, 4)
    streamed = GemmConfig("ws", 128, 256, 64, 8, 4, split=0)
    problem = GemmProblem(2048, 6144, 4096)
    tiles = space.num_tiles(problem, whole)
    exact, above = Budget(tiles // 4, "mask"), Budget(tiles // 4 - 1, "mask")
    per_wave = predict_us(problem, whole, exact, profile) / 4
    lost = predict_us(problem, whole, above, profile) - 4 * per_wave
    assert lost > 0.6 * per_wave
    saved = predict_us(problem, whole, above, profile) - predict_us(
        problem, streamed, above, profile
    )
    assert saved > 0.4 * per_wave


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
    assert 0 < predict_us(problem, space.CUBLASLT, budget, profile) < ours


def test_constants_come_from_data():
    constants = CostConstants.from_mapping({"launch_us": 3, "tile_us": 0.25})
    assert (constants.launch_us, constants.tile_us) == (3.0, 0.25)
    assert constants.step_us == DEFAULTS.step_us
    with pytest.raises(KeyError, match=r"unknown cost constants.*lunch_us"):
        CostConstants.from_mapping({"lunch_us": 3})
