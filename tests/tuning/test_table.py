"""GEMM's tuned cells: which cell serves a problem; the constants of a GPU."""

from dataclasses import replace

import pytest

from smkern.errors import TableError
from smkern.tuning import cells, constraints
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS, load_constants
from smkern.tuning.table import Cell, CellKey, Table

META = dict.fromkeys(cells.PROVENANCE, "x") | {"gpu": "NVIDIA H200"}
BUDGET = Budget(32, "mask", False)
CONFIG = GemmConfig("ws", 64, 128, 64, 4, 6, ctas_per_sm=2, split=0, group_m=4, max_ctas=30)


def cell(us: float = 10.0, config: GemmConfig = CONFIG) -> Cell:
    return Cell(config, us, config, us)


def key(m: int, num_sms: int = 32) -> CellKey:
    return CellKey.of(GemmProblem(m, 6144, 4096), replace(BUDGET, num_sms=num_sms))


@pytest.mark.parametrize(("m", "found"), [(33, True), (64, True), (32, False), (65, False)])
def test_a_cell_serves_the_rows_of_its_tiles_only(m, found):
    """Tuned at 32 and 64 with tiles of 64 rows: 33 to 64 are one tile; 32 has its own cell."""
    own = replace(CONFIG, block_m=64)
    tuned = Table({}, {key(32): cell(1, replace(CONFIG, block_m=128)), key(64): cell(2, own)})
    config = tuned.lookup(GemmProblem(m, 6144, 4096), BUDGET)
    assert (config == own) is found


def test_fewer_row_tiles_than_tuned_fall_to_the_model():
    tuned = Table({}, {key(256): cell(1, replace(CONFIG, block_m=64))})
    assert tuned.lookup(GemmProblem(193, 6144, 4096), BUDGET) is not None
    assert tuned.lookup(GemmProblem(192, 6144, 4096), BUDGET) is None


def test_what_the_library_won_holds_for_its_rows_alone():
    """On 100 SMs it took a kernel for 136 rows that could not launch there; that for 256 could."""
    budget = Budget(100, "mask", True)
    at = CellKey.of(GemmProblem(256, 6144, 4096), budget)
    tuned = Table({}, {at: Cell(constraints.CUBLASLT, 5.0, CONFIG, 6.0)})
    assert tuned.lookup(GemmProblem(256, 6144, 4096), budget) == constraints.CUBLASLT
    assert tuned.lookup(GemmProblem(200, 6144, 4096), budget) == CONFIG
    assert tuned.library_us(GemmProblem(256, 6144, 4096), budget, constraints.CUBLASLT) == 5.0
    assert tuned.library_us(GemmProblem(256, 6144, 4096), budget, CONFIG) is None
    assert tuned.library_us(GemmProblem(200, 6144, 4096), budget, constraints.CUBLASLT) is None


@pytest.mark.parametrize(
    ("problem", "budget"),
    [
        (GemmProblem(64, 6144, 4096), replace(BUDGET, num_sms=34)),
        (GemmProblem(64, 6144, 4096), replace(BUDGET, confined="grid")),
        (GemmProblem(64, 6144, 4096), replace(BUDGET, clusters=True)),
        (GemmProblem(64, 6144, 4096, "fp16"), BUDGET),
        (GemmProblem(64, 6144, 4096, epilogue=Epilogue(bias=True)), BUDGET),
        (GemmProblem(64, 6144, 4096, aligned=False), BUDGET),
        (GemmProblem(64, 6144, 4160), BUDGET),
    ],
)
def test_anything_else_is_not_served(problem, budget):
    tuned = Table({}, {key(64): cell()})
    assert tuned.lookup(GemmProblem(64, 6144, 4096), BUDGET) == CONFIG
    assert tuned.lookup(problem, budget) is None


def test_corrupt_constants_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "SHIPPED", tmp_path)
    path = tmp_path / "corrupt" / "cost_model.json"
    path.parent.mkdir()
    path.write_text('{"constants": {"lunch_us": 1}}')
    with pytest.raises(TableError, match=r"cost_model.json holds no constants.*autotune.fit"):
        load_constants("NVIDIA corrupt")


def test_batch_invariant_problems_take_whole_k_loops_of_ours_only():
    whole = replace(CONFIG, split=1)
    problem = GemmProblem(64, 6144, 4096, batch_invariant=True)
    for own, served in ((CONFIG, None), (whole, whole), (replace(whole, kernel="pointer"), None)):
        tuned = Table(META, {key(64): Cell(constraints.CUBLASLT, 5.0, own, 6.0)})
        assert tuned.lookup(problem, BUDGET) == served


def test_constants_are_those_of_the_generation_where_nobody_fitted_them():
    own = load_constants("NVIDIA H200", (9, 0))
    assert own.variants
    assert load_constants("NVIDIA H100 80GB HBM3", (9, 0)) == own
    for name, capability in (("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA B200", (10, 0))):
        assert load_constants(name, capability) == DEFAULTS


def test_a_cell_serves_batches_of_more_than_half_its_rows():
    """What is best for 64 rows takes a third longer for one, and a tenth for 32."""
    found = Table(cells={key(64): cell()})
    rows = {m: found.lookup(GemmProblem(m, 6144, 4096), BUDGET) for m in (1, 32, 33, 64)}
    assert {m for m, config in rows.items() if config} == {33, 64}
