"""Tuned cells of e4m3: which rows and epilogues a cell serves, and which cells are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.errors import TableError
from smkern.profile import load_profile
from smkern.tuning import fp8, fp8_cutlass
from smkern.tuning.cells import Cells
from smkern.tuning.config import Budget, Epilogue, GemmConfig
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.fp8_table import FP8_FAMILY, ScaledKey, ScaledTable
from smkern.tuning.table import Cell

H200 = load_profile("h200")
CAPABILITY = H200.info.capability
BUDGET = Budget(24, "mask", False)
PROBLEM = ScaledProblem(192, 6144, 4096, scales="block")
CONFIG = next(
    replace(x, split=0)
    for x in fp8.variants(False, True, CAPABILITY, True)
    if (x.block_m, x.block_n) == (64, 128) and not x.swap
)
CUTLASS = replace(fp8_cutlass.variants(CAPABILITY)[-1], group_m=1)


def own(config: GemmConfig) -> Cell:
    """A cell that needs no extra."""
    return Cell(config, 10.0, config, 10.0)


TABLE = ScaledTable({ScaledKey.of(PROBLEM, BUDGET): own(CONFIG)})
FEW = replace(PROBLEM, m=64)
BOTH = ScaledTable({ScaledKey.of(FEW, BUDGET): Cell(CUTLASS, 9.0, CONFIG, 10.0)})


@pytest.mark.parametrize("m", [129, 150, 192])
def test_a_cell_serves_rows_that_make_as_many_tiles(m):
    assert TABLE.lookup(replace(PROBLEM, m=m), BUDGET, CAPABILITY) == CONFIG


@pytest.mark.parametrize(
    "problem",
    [
        replace(PROBLEM, m=128),
        replace(PROBLEM, m=193),
        replace(PROBLEM, scales="row"),
        replace(PROBLEM, n=4096),
        replace(PROBLEM, batch_invariant=True),
        replace(PROBLEM, aligned=False),
        replace(PROBLEM, kernel="pointer"),
    ],
    ids=["fewer tiles", "more tiles", "rows", "n", "batch-invariant", "unaligned", "forced"],
)
def test_a_cell_serves_nothing_else(problem):
    assert TABLE.lookup(problem, BUDGET, CAPABILITY) is None
    assert FP8_FAMILY.config(problem, BUDGET, H200, TABLE) == fp8.choose(problem, BUDGET, H200)


def test_where_an_extra_is_absent_the_best_of_the_others_serves():
    assert BOTH.lookup(FEW, BUDGET, CAPABILITY) == CONFIG
    assert BOTH.lookup(FEW, BUDGET, CAPABILITY, lambda problem, config: False) == CONFIG
    asked = []

    def served(problem: ScaledProblem, config: GemmConfig) -> bool:
        asked.append((problem, config))
        return True

    assert BOTH.lookup(FEW, BUDGET, CAPABILITY, served) == CUTLASS
    assert asked == [(FEW, CUTLASS)]
    assert TABLE.lookup(PROBLEM, BUDGET, CAPABILITY, served) == CONFIG


def test_one_cell_serves_every_epilogue():
    for epilogue in (Epilogue(True, True), Epilogue(activation="gelu")):
        problem = replace(FEW, epilogue=epilogue)
        assert BOTH.lookup(problem, BUDGET, CAPABILITY, lambda problem, config: True) == CUTLASS


def test_a_cell_serves_its_budget_alone():
    for budget in (Budget(26, "mask", False), Budget(24, "grid", False)):
        assert TABLE.lookup(PROBLEM, budget, CAPABILITY) is None


def test_a_residual_takes_the_stages_that_leave_it_room():
    swapped = [
        x for x in fp8.variants(False, True, CAPABILITY, True) if x.swap and x.ctas_per_sm == 3
    ]
    with_residual = fp8.variants(True, True, CAPABILITY, True)
    problem = ScaledProblem(32, 6144, 4096, epilogue=Epilogue(residual=True), scales="block")
    for config in swapped:
        if config.block_m != 32:
            continue
        key = ScaledKey.of(problem, BUDGET)
        found = ScaledTable({key: own(config)}).lookup(problem, BUDGET, CAPABILITY)
        assert found is None or replace(found, split=1) in with_residual


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, block_m=96),
        replace(CONFIG, ctas_per_sm=9),
        replace(CONFIG, num_warps=8),
        replace(CONFIG, split=64),
        replace(CONFIG, group_m=0),
        GemmConfig("ws", 192, 128, 64, 12, 5, eager=True),
    ],
    ids=["tile", "ctas", "warps", "split", "group", "three parts"],
)
def test_a_cell_that_cannot_run_is_refused(config, tmp_path):
    file = FP8_FAMILY.file(tmp_path / "gemm_fp8.json")
    cells = {ScaledKey.of(PROBLEM, BUDGET): own(config)}
    file.path.write_text(file.dump(Cells({"gpu": H200.info.name}, cells)))
    with pytest.raises(TableError, match="invalid cell"):
        FP8_FAMILY.cells_of(file.path, H200)


def test_a_cell_without_one_that_needs_no_extra_is_refused(tmp_path):
    file = FP8_FAMILY.file(tmp_path / "gemm_fp8.json")
    cells = {ScaledKey.of(FEW, BUDGET): own(CUTLASS)}
    file.path.write_text(file.dump(Cells({"gpu": H200.info.name}, cells)))
    with pytest.raises(TableError, match="breaks own"):
        FP8_FAMILY.cells_of(file.path, H200)


def test_a_file_keeps_its_cells(tmp_path):
    file = FP8_FAMILY.file(tmp_path / "gemm_fp8.json")
    cells = {
        ScaledKey.of(PROBLEM, BUDGET): own(CONFIG),
        ScaledKey.of(FEW, BUDGET): Cell(CUTLASS, 9.0, CONFIG, 10.0),
    }
    file.path.write_text(file.dump(Cells({"gpu": H200.info.name}, cells)))
    assert FP8_FAMILY.cells_of(file.path, H200).cells == cells
