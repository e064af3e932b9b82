"""SwiGLU in the GEMM's tuning: its space, its cells, and whose cells serve where it has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.profile import load_profile
from smkern.tuning import constraints, cost_model, select
from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.table import Cell, CellKey, Table

SM_90 = (9, 0)
BUDGET = Budget(32, "mask", True)
SWIGLU = Epilogue(swiglu=True)
PROBLEM = GemmProblem(64, 28672, 4096, epilogue=SWIGLU)
PLAIN = replace(PROBLEM, epilogue=Epilogue())
WS = GemmConfig("ws", 64, 128, 64, 4, 8, swap=True)


def table(cells: dict[GemmProblem, GemmConfig]) -> Table:
    found = {}
    for problem, config in cells.items():
        own = WS if config.kernel in constraints.LIBRARIES else config
        found[CellKey.of(problem, BUDGET)] = Cell(config, 10.0, own, 11.0)
    return Table({}, found)


def test_half_as_many_columns_are_written():
    assert PROBLEM.out_columns == 14336
    assert PLAIN.bytes_moved - PROBLEM.bytes_moved == 2 * 64 * 14336
    assert PROBLEM.flops == PLAIN.flops
    assert SWIGLU.key == "swiglu"


@pytest.mark.parametrize(
    ("problem", "config", "legal"),
    [
        (PROBLEM, WS, True),
        (PROBLEM, replace(WS, block_n=64), True),
        (PROBLEM, GemmConfig("tma", 64, 64, 64, 4, 4, swap=True), False),
        (PROBLEM, GemmConfig("tma", 64, 128, 64, 4, 4, swap=True), True),
        (PROBLEM, GemmConfig("tma", 64, 64, 64, 4, 4), True),
        (PROBLEM, constraints.UNFUSED, True),
        (PROBLEM, constraints.CUBLASLT, False),
        (PLAIN, constraints.UNFUSED, False),
        (replace(PROBLEM, m=8192), constraints.UNFUSED, False),
        (replace(PROBLEM, batch_invariant=True), constraints.UNFUSED, False),
        (replace(PROBLEM, n=28673), WS, False),
        (replace(PROBLEM, epilogue=Epilogue(residual=True, swiglu=True)), WS, False),
    ],
)
def test_what_is_legal(problem, config, legal):
    assert constraints.is_legal(problem, config, BUDGET, SM_90) == legal


@pytest.mark.parametrize("m", [1, 8, 64, 128, 512, 8192])
@pytest.mark.parametrize("num_sms", [16, 60, 132])
def test_the_model_picks_a_legal_one(m, num_sms):
    problem, budget = replace(PROBLEM, m=m), Budget(num_sms, "mask", True)
    found = select.select_gemm(problem, budget, load_profile())
    assert found.config.kernel == "ws"
    assert constraints.is_legal(problem, found.config, budget, SM_90)


def test_one_configuration_whatever_the_batch():
    chosen = {
        select.select_gemm(
            replace(PROBLEM, m=m, batch_invariant=True), Budget(n, "mask", True), load_profile()
        ).config
        for m in (1, 64, 300)
        for n in (16, 132)
    }
    assert len(chosen) == 1


def test_unfused_is_predicted_to_cost_its_round_trip():
    times = [
        cost_model.predict_us(problem, config, BUDGET, load_profile())
        for problem, config in ((PROBLEM, constraints.UNFUSED), (PLAIN, constraints.CUBLASLT))
    ]
    assert times[0] > times[1]


def test_its_own_cell_comes_first():
    mine, other = replace(WS, num_stages=7), WS
    found = table({PROBLEM: mine, PLAIN: other})
    assert found.lookup(PROBLEM, BUDGET) == mine
    assert found.lookup(PLAIN, BUDGET) == other


def test_without_one_the_plain_gemms_kernel_serves():
    assert table({PLAIN: WS}).lookup(PROBLEM, BUDGET) == WS
    assert table({PLAIN: constraints.CUBLASLT}).lookup(PROBLEM, BUDGET) == WS
    thin = GemmConfig("tma", 64, 64, 64, 4, 4, swap=True)
    assert table({PLAIN: thin}).lookup(PROBLEM, BUDGET) is None


def test_an_unfused_cell_serves_unless_a_kernel_is_asked_for():
    found = table({PROBLEM: constraints.UNFUSED})
    assert found.lookup(PROBLEM, BUDGET) == constraints.UNFUSED
    assert found.lookup(PROBLEM, BUDGET, allow_cublaslt=False) == WS
    same = replace(PROBLEM, batch_invariant=True)
    assert found.lookup(same, BUDGET) == WS
    split = table({same: replace(WS, split=STREAM_K)})
    assert split.lookup(same, BUDGET) is None
