"""What the tuner chooses to measure."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.autotune.shortlist import MAX_OF_A_KIND, parse_epilogue, problems, shortlist
from smkern.tuning import space
from smkern.tuning.config import Budget, Epilogue, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS


@pytest.mark.parametrize("m", [1, 64, 77, 512, 8192])
@pytest.mark.parametrize("num_sms", [16, 60, 132])
def test_shortlist_is_legal_ordered_and_of_several_kinds(profile, m, num_sms):
    problem, budget = GemmProblem(m, 6144, 4096), Budget(num_sms, "mask", False)
    found = shortlist(problem, budget, profile, DEFAULTS, top=8)
    assert len(found) >= 8
    assert [c.predicted_us for c in found] == sorted(c.predicted_us for c in found)
    assert len({c.name for c in found}) == len(found)
    kinds = Counter(
        (c.config.kernel, c.config.block_m, c.config.block_n, c.config.swap) for c in found
    )
    assert max(kinds.values()) <= 2 * MAX_OF_A_KIND
    for swapped in (c.config for c in found if c.config.kernel == "ws" and c.config.swap):
        assert replace(swapped, eager=not swapped.eager) in {c.config for c in found}
    for item in found:
        assert space.violations(problem, item.config, budget, (9, 0)) == []


def test_the_library_is_a_candidate_where_clusters_launch(profile):
    problem = GemmProblem(512, 6144, 4096)
    with_clusters = shortlist(problem, Budget(100, "mask", True), profile, DEFAULTS)
    without = shortlist(problem, Budget(32, "mask", False), profile, DEFAULTS)
    by_grid = shortlist(problem, Budget(100, "grid", True), profile, DEFAULTS)
    whole = shortlist(problem, Budget(132, "grid", True), profile, DEFAULTS)
    assert whole[-1].config == space.CUBLASLT
    unwanted = shortlist(problem, Budget(100, "mask", True), profile, DEFAULTS, cublaslt=False)
    assert with_clusters[-1].config == space.CUBLASLT
    assert space.CUBLASLT not in [c.config for c in (*without, *unwanted, *by_grid)]


def test_only_the_kernels_that_are_asked_for(profile):
    problem, budget = GemmProblem(512, 6144, 4096), Budget(32, "mask", False)
    found = shortlist(problem, budget, profile, DEFAULTS, kernels=("tma",))
    assert {c.config.kernel for c in found} == {"tma"}


@given(st.builds(Epilogue, st.booleans(), st.booleans(), st.sampled_from([None, "silu", "gelu"])))
def test_epilogues_have_names(epilogue):
    assert parse_epilogue(epilogue.key) == epilogue


def test_an_epilogue_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'relu' is no epilogue"):
        parse_epilogue("bias+relu")


def test_problems_keep_a_weight_together():
    found = problems([(64, 128), (128, 64)], [1, 2], epilogues=[Epilogue(), Epilogue(bias=True)])
    assert [(p.n, p.m) for p in found][:4] == [(64, 1), (64, 2), (64, 1), (64, 2)]
    assert len(found) == 8
