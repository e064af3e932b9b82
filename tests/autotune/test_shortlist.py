"""What the tuner chooses to measure."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.autotune.shortlist import MAX_OF_A_KIND, OF_EXTRAS, problems, shortlist
from smkern.measure.options import parse_epilogue
from smkern.tuning import constraints
from smkern.tuning.config import Budget, Epilogue, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS


@pytest.mark.parametrize("m", [1, 64, 77, 512, 8192])
@pytest.mark.parametrize("num_sms", [16, 60, 132])
def test_shortlist_is_legal_ordered_and_of_several_kinds(profile, m, num_sms):
    problem, budget = GemmProblem(m, 6144, 4096), Budget(num_sms, "mask", False)
    found = shortlist(problem, budget, profile, DEFAULTS, top=8)
    assert len(found) >= 8
    assert list(found.values()) == sorted(found.values())
    listed = {replace(c, overlap=True) for c in found}
    kinds = Counter((c.kernel, c.block_m, c.block_n, c.swap) for c in listed)
    assert max(kinds.values()) <= 2 * MAX_OF_A_KIND
    for swapped in (c for c in listed if c.kernel == "ws" and c.swap):
        assert replace(swapped, eager=not swapped.eager) in listed
    first = [c for c in found if c.kernel == "ws"][:1]
    assert all(replace(c, overlap=not c.overlap) in found for c in first)
    for config in found:
        assert constraints.violations(problem, config, budget, (9, 0)) == []


def test_the_library_is_a_candidate_where_clusters_launch(profile):
    problem = GemmProblem(512, 6144, 4096)
    with_clusters = shortlist(problem, Budget(100, "mask", True), profile, DEFAULTS)
    without = shortlist(problem, Budget(32, "mask", False), profile, DEFAULTS)
    by_grid = shortlist(problem, Budget(100, "grid", True), profile, DEFAULTS)
    whole = shortlist(problem, Budget(132, "grid", True), profile, DEFAULTS)
    assert list(whole)[-1] == constraints.CUBLASLT
    assert list(with_clusters)[-1] == constraints.CUBLASLT
    assert constraints.CUBLASLT not in {*without, *by_grid}


def test_kernels_of_an_extra_come_besides_those_that_are_always_there(profile):
    problem, budget = GemmProblem(136, 6144, 4096), Budget(32, "mask", False)
    without = shortlist(problem, budget, profile, DEFAULTS)
    not_136 = lambda problem, config: config.block_m != 136  # noqa: E731
    found = shortlist(problem, budget, profile, DEFAULTS, served=not_136)
    extras = [config for config in found if config.kernel == "cutlass"]
    assert len(extras) == OF_EXTRAS
    assert {*found} - {*extras} == {*without}
    assert all(constraints.is_legal(problem, config, budget, (9, 0)) for config in extras)
    assert 136 not in {config.block_m for config in extras}
    unaligned = replace(problem, aligned=False)
    every = shortlist(unaligned, budget, profile, DEFAULTS, served=lambda *_: True)
    assert {config.kernel for config in every} == {"pointer"}


@given(st.builds(Epilogue, st.booleans(), st.booleans(), st.sampled_from([None, "silu", "gelu"])))
def test_epilogues_have_names(epilogue):
    assert parse_epilogue(epilogue.key) == epilogue


def test_an_epilogue_that_is_none_is_refused():
    with pytest.raises(ValueError, match="epilogue 'bias\\+relu'"):
        parse_epilogue("bias+relu")


def test_problems_keep_a_weight_together():
    found = problems([(64, 128), (128, 64)], [1, 2], epilogues=[Epilogue(), Epilogue(bias=True)])
    assert [(p.n, p.m) for p in found][:4] == [(64, 1), (64, 2), (64, 1), (64, 2)]
    assert len(found) == 8
