"""Dispatch's choice: total, legal, monotone, invariant where asked, table before model."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.errors import ArgumentError, BudgetError
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.tuning import constraints, cost_model
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS, load_constants
from smkern.tuning.select import rank, select_gemm, select_near
from smkern.tuning.table import Cell, CellKey, Table

pytestmark = pytest.mark.slow

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
@settings(max_examples=100)
def test_any_problem_in_any_budget_has_a_legal_choice(profile, problem, budget):
    found = select_gemm(problem, budget, profile)
    assert constraints.violations(problem, found.config, budget, SM_90) == []
    assert found.source == "model"
    assert 0 < found.predicted_us < float("inf")


@given(problems, budgets)
@settings(max_examples=50)
def test_any_problem_has_a_legal_choice_on_sm_80(ampere, problem, budget):
    budget = replace(budget, num_sms=min(budget.num_sms, 108))
    found = select_gemm(problem, budget, ampere)
    assert constraints.violations(problem, found.config, budget, (8, 0)) == []


@given(problems, budgets)
@settings(max_examples=60)
def test_pruning_never_loses_the_best(profile, problem, budget):
    problem = replace(problem, batch_invariant=False)
    best = rank(problem, budget, profile)[0].predicted_us
    assert rank(problem, budget, profile, prune=True)[0].predicted_us == pytest.approx(best)


@given(
    st.integers(1, 8192),
    st.sampled_from([(6144, 4096), (4096, 14336), (28672, 4096), (1000, 520)]),
    st.sampled_from(["mask", "grid"]),
    st.sets(st.integers(1, 132), min_size=8, max_size=16).map(sorted),
)
@settings(max_examples=25)
def test_more_sms_are_never_predicted_slower(profile, m, weight, confined, budgets):
    """But where launches that overlap share SMs unevenly, by what it costs to keep them apart."""
    fitted = load_constants(profile.info.name)
    even = replace(fitted, overlap_dram=0.0)
    best = best_even = float("inf")
    for num_sms in budgets:
        problem, budget = GemmProblem(m, *weight), Budget(num_sms, confined, False)
        evenly_us = select_gemm(problem, budget, profile, constants=even).predicted_us
        found_us = select_gemm(problem, budget, profile).predicted_us
        # stream-K's pieces are whole steps of K, and their number changes by ones
        assert evenly_us <= 1.01 * best_even, f"{num_sms} SMs"
        assert found_us <= 1.01 * best + fitted.apart_us, f"{num_sms} SMs"
        best, best_even = min(best, found_us), min(best_even, evenly_us)


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
    table = Table({}, {CellKey.of(problem, budget): Cell(constraints.CUBLASLT, 1.0, TUNED, 2.0)})
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
    table = Table({}, {CellKey.of(problem, budget): Cell(constraints.CUBLASLT, 8.0, TUNED, 9.0)})
    assert select_gemm(problem, budget, profile, table).config == constraints.CUBLASLT
    assert table.lookup(problem, budget, allow_cublaslt=False) == TUNED


def test_a_budget_below_one_sm_is_refused(profile):
    with pytest.raises(BudgetError, match="num_sms is 0"):
        select_gemm(GemmProblem(1, 64, 64), Budget(0, "grid"), profile)


def test_a_kernel_that_cannot_serve_is_named(profile):
    problem = GemmProblem(1, 64, 64, aligned=False)
    with pytest.raises(ArgumentError, match="no kernel of"):
        select_gemm(problem, Budget(8, "grid"), profile, kernels=("tma",))


@pytest.fixture(scope="module")
def second(profile) -> GemmConfig:
    """What the model holds for nearly as good as its choice, on 36 SMs."""
    return rank(GemmProblem(64, 6144, 4096), Budget(36, "mask", False), profile)[1].config()


def tuned(second: GemmConfig, *cells: tuple[int, int], us: float = 10.0) -> Table:
    """A table with a cell of 6144x4096 for each (m, num_sms)."""
    return Table(
        cells={
            CellKey.of(GemmProblem(m, 6144, 4096), Budget(num_sms, "mask", False)): Cell(
                second, us, second, us
            )
            for m, num_sms in cells
        }
    )


@pytest.mark.parametrize(
    ("cells", "served"),
    [
        ([(64, 32), (64, 40)], True),  # budgets on both sides
        ([(64, 40)], True),
        ([(96, 36)], True),  # rows
        ([(64, 16), (64, 100)], False),  # too far
        ([(8, 36), (512, 36)], False),
        ([], False),
    ],
)
def test_a_cell_beside_the_problem_says_what_to_run(profile, second, cells, served):
    problem, budget = GemmProblem(64, 6144, 4096), Budget(36, "mask", False)
    modelled = select_gemm(problem, budget, profile, constants=DEFAULTS)
    found = select_near(problem, budget, profile, tuned(second, *cells), modelled, DEFAULTS)
    assert (found is not None) == served
    if found is not None:
        assert found.source == "near"
        assert replace(found.config, max_ctas=0) == second


def test_more_sms_than_a_cell_has_take_no_longer_than_it(profile, second):
    problem, budget = GemmProblem(64, 6144, 4096), Budget(36, "mask", False)
    modelled = select_gemm(problem, budget, profile, constants=DEFAULTS)
    found = select_near(problem, budget, profile, tuned(second, (64, 32)), modelled, DEFAULTS)
    assert found is not None
    assert found.predicted_us <= 10.0
    assert constraints.num_ctas(found.config, budget) >= 32


def test_the_models_choice_stands_against_a_neighbour_that_is_slower(profile):
    problem, budget = GemmProblem(64, 6144, 4096), Budget(36, "mask", False)
    modelled = select_gemm(problem, budget, profile, constants=DEFAULTS)
    slow = GemmConfig("ws", 256, 128, 64, 8, 4)
    there = replace(budget, num_sms=32)
    us = cost_model.predict_us(problem, slow, there, profile)
    table = Table(cells={CellKey.of(problem, there): Cell(slow, us, slow, us)})
    assert select_near(problem, budget, profile, table, modelled, DEFAULTS) is None


def test_an_epilogue_without_cells_takes_those_of_the_plain_gemm(second):
    problem = GemmProblem(64, 6144, 4096, epilogue=Epilogue(residual=True))
    budget = Budget(36, "mask", False)
    keys = [key.epilogue for key, _ in tuned(second, (64, 32)).neighbours(problem, budget)]
    assert keys == ["none"]


WHOLE = Budget(132, "mask", True)


@pytest.mark.parametrize(
    ("problem", "budget", "librarys"),
    [
        (GemmProblem(400, 6144, 4096), WHOLE, True),
        (GemmProblem(400, 6144, 4096, epilogue=Epilogue(bias=True, residual=True)), WHOLE, True),
        (GemmProblem(448, 6144, 4096), WHOLE, False),
        (GemmProblem(64, 6144, 4096), WHOLE, False),
        (GemmProblem(400, 6144, 4096), Budget(130, "mask", True), False),
        (GemmProblem(400, 6144, 4096, batch_invariant=True), WHOLE, False),
        (GemmProblem(400, 6144, 4096, "fp32"), WHOLE, False),
        (GemmProblem(400, 6144, 4096, epilogue=Epilogue(activation="silu")), WHOLE, False),
        (GemmProblem(400, 6144, 4096, epilogue=Epilogue(swiglu=True)), WHOLE, False),
    ],
)
def test_the_library_serves_the_whole_device_where_no_cell_has_the_rows(
    profile, problem, budget, librarys
):
    key = CellKey.of(GemmProblem(448, 6144, 4096), WHOLE)
    dispatcher = offline_dispatcher(profile, Table({}, {key: Cell(TUNED, 9.0, TUNED, 9.0)}))
    found = dispatcher.select(problem, budget)
    assert (found.source == "library") is librarys
    own = dispatcher.select(problem, budget, "own")
    assert own.config.kernel != "cublaslt"
    if librarys:
        assert found.config == constraints.CUBLASLT
        assert found.predicted_us == own.predicted_us, "the cost model knows no library's tiles"
