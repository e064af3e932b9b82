"""A table is decided again from raw measurements, ties by the tuner's own rule."""

from click.testing import CliRunner

from smkern.autotune import raw
from smkern.autotune.rebuild import command, never_slower
from smkern.device import Budget
from smkern.tuning.cells import PROVENANCE
from smkern.tuning.config import GemmConfig, GemmProblem
from smkern.tuning.select import GEMM_FAMILY
from smkern.tuning.table import Cell, CellKey

PROBLEM, BUDGET = GemmProblem(512, 4096, 4096), Budget(100, "mask", False)
WHOLE = GemmConfig("ws", 128, 256, 64, 8, 4)
STREAMED = GemmConfig("ws", 128, 256, 64, 8, 4, split=0)
SLOW = GemmConfig("ws", 128, 128, 64, 8, 6)


def measured(config, us, predicted_us=50.0):
    return raw.Measurement(PROBLEM, BUDGET, config, us, 0.001, predicted_us)


def test_ties_go_to_whole_k_loops_and_the_newest_time_counts(tmp_path):
    table = GEMM_FAMILY.file(tmp_path / "gemm.json")
    table.merge({}, dict.fromkeys(PROVENANCE, "x"))
    path = tmp_path / "raw.jsonl"
    raw.append(path, [measured(WHOLE, 90.0), measured(STREAMED, 60.0), measured(SLOW, 80.0)])
    raw.append(path, [measured(WHOLE, 60.5)])
    ran = CliRunner().invoke(command, [str(path), "--out", str(table.path)])
    assert ran.exit_code == 0, ran.output
    cell = table.load().cells[CellKey.of(PROBLEM, BUDGET)]
    assert (cell.config, cell.us) == (WHOLE, 60.5)


def test_a_table_without_provenance_is_refused(tmp_path):
    path = tmp_path / "raw.jsonl"
    raw.append(path, [measured(WHOLE, 90.0)])
    ran = CliRunner().invoke(command, [str(path), "--out", str(tmp_path / "none.json")])
    assert ran.exit_code == 2
    assert "provenance" in ran.output


def test_a_larger_budget_runs_as_a_faster_smaller_one():
    def cell(us):
        return Cell(WHOLE, us, WHOLE, us)

    keys = [CellKey.of(PROBLEM, Budget(n, "mask", n > 66)) for n in (60, 84, 100, 116)]
    found = never_slower(dict(zip(keys, map(cell, (100.0, 80.0, 90.0, 70.0)), strict=True)))
    assert [found[key].own_us for key in keys] == [100.0, 80.0, 80.0, 70.0]
    assert [found[key].own.max_ctas for key in keys] == [0, 0, 84, 0]
