"""Dispatch's choice: total, legal, monotone, quick, invariant where asked, table before model."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.errors import ArgumentError, BudgetError
from smkern.tuning import space
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.select import rank, select_gemm
from smkern.tuning.table import Cell, CellKey, Table

SM_90 = (9, 0)
sizes = st.one_of(st.integers(1, 8192), st.sampled_from([1, 64, 128, 4096, 8192]))
epilogues = st.builds(
    Epilogue, st.booleans(), st.booleans(), st.sampled_from([None, "silu", "gelu"])
)
problems = st.builds(
    GemmProblem,
    sizes,
    sizes,
    sizes,
    st.sampled_from(["bf16", "fp16", "fp32"]),
    epilogues,
    st.booleans(),
    st.booleans(),
)
budgets = st.builds(Budget, st.integers(1, 132), st.sampled_from(["mask", "grid"]), st.booleans())


@given(problems, budgets)
@settings(max_examples=300, deadline=None)
def test_any_problem_in_any_budget_has_a_legal_choice(profile, problem, budget):
    found = select_gemm(problem, budget, profile)
    assert space.violations(problem, found.config, budget, SM_90) == []
    assert found.source == "model"
    assert 0 < found.predicted_us < float("inf")


@given(problems, budgets)
@settings(max_examples=50, deadline=None)
def test_any_problem_has_a_legal_choice_on_sm_80(ampere, problem, budget):
    budget = replace(budget, num_sms=min(budget.num_sms, 108))
    found = select_gemm(problem, budget, ampere)
    assert space.violations(problem, found.config, budget, (8, 0)) == []


@given(problems, budgets)
@settings(max_examples=60, deadline=None)
def test_pruning_never_loses_the_best(profile, problem, budget):
    problem = replace(problem, batch_invariant=False)
    best = rank(problem, budget, profile)[0].predicted_us
    assert rank(problem, budget, profile, prune=True)[0].predicted_us == pytest.approx(best)


@given(
    st.integers(1, 8192),
    st.sampled_from([(6144, 4096), (4096, 14336), (28672, 4096), (1000, 520)]),
    st.sampled_from(["mask", "grid"]),
)
@settings(max_examples=25, deadline=None)
def test_more_sms_are_never_predicted_slower(profile, m, weight, confined):
    best = float("inf")
    for num_sms in range(2, 133, 2):
        budget = Budget(num_sms, confined, False)
        found = select_gemm(GemmProblem(m, *weight), budget, profile)
        # pieces of K are whole steps, and only some counts of CTAs make equal ones
        assert found.predicted_us <= 1.02 * best, f"{num_sms} SMs"
        best = min(best, found.predicted_us)


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (28672, 4096), (520, 72)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_batch_invariant_choice_is_one_for_all_rows_and_budgets(profile, n, k, dtype):
    found = {
        select_gemm(
            GemmProblem(m, n, k, dtype, batch_invariant=True),
            Budget(num_sms, confined, clusters),
            profile,
        ).config
        for m in (1, 2, 7, 64, 65, 256, 3001, 8192)
        for num_sms in (8, 16, 60, 132)
        for confined in ("mask", "grid")
        for clusters in (False, True)
    }
    assert len(found) == 1
    assert found.pop().split == 1


def test_batch_invariant_ignores_tables_and_measurements(profile):
    problem, budget = GemmProblem(64, 6144, 4096), Budget(32, "mask", True)
    invariant = replace(problem, batch_invariant=True)
    table = Table({}, {CellKey.of(problem, budget): Cell(space.CUBLASLT, 1.0, TUNED, 2.0)})
    assert select_gemm(invariant, budget, profile, table) == select_gemm(invariant, budget, profile)


TUNED = GemmConfig("tma", 64, 128, 64, 4, 3)


def test_the_table_counts_before_the_model(profile):
    problem, budget = GemmProblem(64, 6144, 4096), Budget(32, "mask", True)
    table = Table({}, {CellKey.of(problem, budget): Cell(TUNED, 9.0, TUNED, 9.0)})
    found = select_gemm(problem, budget, profile, table)
    assert (found.config, found.source) == (TUNED, "table")
    for other in (Budget(34, "mask", True), Budget(32, "grid", True), Budget(32, "mask", False)):
        assert select_gemm(problem, other, profile, table).source == "model"


def test_without_the_library_our_own_best_counts(profile):
    problem, budget = GemmProblem(64, 6144, 4096), Budget(32, "mask", True)
    table = Table({}, {CellKey.of(problem, budget): Cell(space.CUBLASLT, 8.0, TUNED, 9.0)})
    assert select_gemm(problem, budget, profile, table).config == space.CUBLASLT
    own = select_gemm(problem, budget, profile, table, allow_cublaslt=False)
    assert (own.config, own.source) == (TUNED, "table")


def test_a_budget_below_one_sm_is_refused(profile):
    with pytest.raises(BudgetError, match="num_sms is 0"):
        select_gemm(GemmProblem(1, 64, 64), Budget(0, "grid"), profile)


def test_a_kernel_that_cannot_serve_is_named(profile):
    problem = GemmProblem(1, 64, 64, aligned=False)
    with pytest.raises(ArgumentError, match="no kernel of"):
        select_gemm(problem, Budget(8, "grid"), profile, kernels=("tma",))


def test_choice_without_a_table_takes_under_a_millisecond(profile):
    cases = [(m, Budget(n, "mask", True)) for m in (1, 64, 512, 3001) for n in (16, 72, 132)]
    for m, budget in cases:  # builds the lists of variants
        select_gemm(GemmProblem(m, 6144, 4096), budget, profile)
    started = time.perf_counter()
    for m, budget in cases:
        select_gemm(GemmProblem(m, 6144, 4096), budget, profile)
    mean_ms = 1e3 * (time.perf_counter() - started) / len(cases)
    assert mean_ms < 3, f"{mean_ms:.2f} ms; about 0.4 on an idle machine"
