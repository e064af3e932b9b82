"""Every configuration that is offered is legal, and each constraint rejects what it is about."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.kernels.gemm_schedule import make_schedule
from smkern.tuning import candidates, constraints
from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.select import rank
from tests.tuning.conftest import FlatProfile

SM_90 = (9, 0)
PROBLEM = GemmProblem(512, 6144, 4096)
BUDGET = Budget(32, "mask", True)
GOOD = GemmConfig("ws", 128, 128, 64, 8, 4)


def candidates_of(problem, budget, capability, kernels=constraints.AVAILABLE):
    """All that the model would choose among."""
    profile = FlatProfile(replace(FlatProfile().info, capability=capability))
    return [item.config() for item in rank(problem, budget, profile, kernels=kernels)]


problems = st.builds(
    GemmProblem,
    m=st.integers(1, 8192),
    n=st.integers(1, 8192),
    k=st.integers(1, 8192),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    aligned=st.booleans(),
    epilogue=st.builds(Epilogue, residual=st.booleans()),
)
budgets = st.builds(Budget, st.integers(1, 132), st.sampled_from(["mask", "grid"]), st.booleans())


@given(
    problems | problems.map(lambda p: replace(p, n=2 * p.n, epilogue=Epilogue(swiglu=True))),
    budgets,
    st.sampled_from([(8, 0), (8, 6), (9, 0), (10, 0)]),
)
def test_every_candidate_is_legal(problem, budget, capability):
    found = candidates_of(problem, budget, capability)
    assert found
    for config in found:
        assert constraints.violations(problem, config, budget, capability) == []
        assert constraints.num_ctas(config, budget) <= budget.num_sms * config.ctas_per_sm
        if budget.confined == "grid":
            assert constraints.num_ctas(config, budget) <= budget.num_sms


BROKEN = {
    "serves_dtype": (replace(PROBLEM, dtype="fp32"), GOOD, BUDGET, SM_90),
    "runs_on_device": (PROBLEM, GOOD, BUDGET, (8, 0)),
    "serves_alignment": (replace(PROBLEM, aligned=False), GOOD, BUDGET, SM_90),
    "has_tile": (PROBLEM, replace(GOOD, block_n=224), BUDGET, SM_90),
    "has_warps": (PROBLEM, replace(GOOD, block_n=256, num_warps=4), BUDGET, SM_90),
    "has_stages": (PROBLEM, replace(GOOD, num_stages=1), BUDGET, SM_90),
    "has_release": (PROBLEM, replace(GOOD, kernel="tma", eager=True), BUDGET, SM_90),
    "has_residency": (PROBLEM, replace(GOOD, ctas_per_sm=4), BUDGET, SM_90),
    "has_groups": (PROBLEM, replace(GOOD, group_m=17), BUDGET, SM_90),
    "fits_shared": (PROBLEM, replace(GOOD, num_stages=8), BUDGET, SM_90),
    "fits_registers": (PROBLEM, replace(GOOD, ctas_per_sm=2, num_stages=2), BUDGET, SM_90),
    "has_pieces": (PROBLEM, replace(GOOD, split=65), BUDGET, SM_90),
    "fits_workspace": (GemmProblem(8192, 28672, 4096), replace(GOOD, split=2), BUDGET, SM_90),
    "keeps_invariance": (
        replace(PROBLEM, batch_invariant=True),
        replace(GOOD, split=STREAM_K),
        BUDGET,
        SM_90,
    ),
    "serves_library": (
        replace(PROBLEM, epilogue=Epilogue(activation="silu")),
        constraints.CUBLASLT,
        BUDGET,
        SM_90,
    ),
    "serves_swiglu": (replace(PROBLEM, epilogue=Epilogue(True, swiglu=True)), GOOD, BUDGET, SM_90),
}


def test_the_good_one_is_legal():
    assert constraints.violations(PROBLEM, GOOD, BUDGET, SM_90) == []


def test_every_constraint_has_its_example():
    assert set(BROKEN) == {each.__name__ for each in constraints.CONSTRAINTS}


@pytest.mark.parametrize("name", BROKEN)
def test_constraint_rejects(name):
    problem, config, budget, capability = BROKEN[name]
    if name == "fits_workspace":  # more tiles than counters
        config = replace(config, block_m=64, block_n=64, num_warps=4)
    assert name in constraints.violations(problem, config, budget, capability)


def test_library_needs_clusters():
    budget = replace(BUDGET, clusters=False)
    assert constraints.violations(PROBLEM, constraints.CUBLASLT, budget, SM_90) == [
        "serves_library"
    ]


@pytest.mark.parametrize("kernel", ["ws", "tma", "pointer"])
def test_deepest_pipeline_cannot_be_deeper(kernel):
    for config in candidates.variants("bf16", True, SM_90, (kernel,)):
        deeper = replace(config, num_stages=config.num_stages + 1)
        assert constraints.violations(GemmProblem(1, 1, 1), deeper, Budget(1, "mask"), SM_90)


def test_sm_80_has_pointer_kernels_within_its_shared_memory():
    found = candidates_of(PROBLEM, BUDGET, (8, 0))
    assert {config.kernel for config in found} == {"pointer"}
    assert max(constraints.shared_bytes(config) for config in found) <= 166_912


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(residual=True), Epilogue(swiglu=True)])
@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_all_rows_have_tiles_where_rows_are_not_aligned(
    capability, dtype, epilogue, confined
) -> None:
    for m in (*range(1, 140), 256, 257, 300, 512, 513, 4096):
        problem = GemmProblem(m, 1000, 520, dtype, epilogue, aligned=False)
        assert candidates.sensible_variants(
            problem, Budget(32, confined), capability, constraints.AVAILABLE
        )


@pytest.mark.parametrize(
    "problem", [replace(PROBLEM, dtype="fp32"), replace(PROBLEM, aligned=False)]
)
def test_what_bulk_copies_cannot_serve_goes_to_the_pointer_kernel(problem):
    assert {c.kernel for c in candidates_of(problem, BUDGET, SM_90)} == {"pointer"}


@given(st.integers(1, 256), st.sampled_from(["ws", "tma"]))
def test_some_swapped_tile_is_sensible_for_few_rows_and_pads_little(m, kernel):
    sensible = candidates.sensible_variants(GemmProblem(m, 64, 64), BUDGET, SM_90, (kernel,))
    heights = {config.block_m for config in sensible if config.swap}
    padded = [-(-m // height) * height for height in heights]
    assert min(padded) < max(2 * m, 17)
    assert len(heights) <= 3


@given(st.integers(257, 600), st.integers(8, 132), st.booleans())
def test_swapped_tiles_of_many_rows_keep_their_loops_whole(m, num_sms, swiglu):
    problem = GemmProblem(m, 24576, 4096, epilogue=Epilogue(swiglu=swiglu))
    swapped = [
        config
        for config in candidates_of(problem, Budget(num_sms, "mask", True), SM_90)
        if config.swap
    ]
    assert all(config.split == 1 for config in swapped)
    assert bool(swapped) == (m <= candidates.SWAPPED_MAX_ROWS)


@given(st.integers(1, 8192), st.integers(1, 132))
def test_raster_groups_are_even_and_no_more_than_they_must_be(m, num_sms):
    group, rows = candidates.group_m(m, GOOD, num_sms), -(-m // GOOD.block_m)
    assert 1 <= group <= min(16, rows)
    groups = -(-rows // group)
    assert groups * group - rows < groups, "a group may lack one row tile, none lacks more"


@given(st.integers(1, 500), st.integers(1, 264), st.integers(1, 256))
def test_splits_have_work_for_every_piece_and_fit_one_wave(tiles, ctas, steps):
    for split in candidates.splits(tiles, ctas, steps):
        if split > 1:
            assert tiles * split <= ctas
            assert steps // split >= candidates.MIN_PIECE_STEPS


@pytest.mark.parametrize("kernel", ["ws", "tma"])
def test_workspace_is_what_the_launch_reserves_at_most(kernel):
    for problem in (GemmProblem(64, 6144, 4096), GemmProblem(1000, 4096, 14336)):
        for num_sms in (16, 72, 132):
            budget = Budget(num_sms, "mask", True)
            for config in candidates_of(problem, budget, SM_90, (kernel,)):
                schedule = make_schedule(problem, config, budget)
                partials = 4 * config.block_m * config.block_n * schedule.partial_slots
                assert partials + constraints.COUNTER_BYTES <= constraints.MAX_WORKSPACE_BYTES
                assert schedule.num_ctas <= constraints.num_ctas(config, budget)
