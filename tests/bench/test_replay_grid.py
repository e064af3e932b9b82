"""`smkern bench replay`: what is refused before a process starts, and what failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.bench.replay.cases import Case
from smkern.bench.replay.grid import Grid, command, run
from smkern.bench.replay.measure import How
from smkern.bench.results import load_results
from smkern.bench.suite import Output

pytestmark = pytest.mark.slow


def test_a_small_table_by_a_process_of_its_own(tmp_path: Path) -> None:
    how = How(seconds=1.0, precision=1.0)
    path = tmp_path / "replay.json"
    # no such model: an error is a cell, and the run goes on
    output = Output(path)
    case = Case("gpt", "sharegpt-like", 30.0, "fcfs", "temporal")
    table = Grid(output.open(gpu="NVIDIA H200"), [case], how)
    run(table, output, jobs=1)
    found = load_results(path)
    (cell,) = found.cells
    assert "gpt" in cell["error"]
    assert found.meta["gpu"] == "NVIDIA H200"
    assert table.left() == []
    again = Grid(Output(path, resume=True).open(gpu="NVIDIA H200"), [case], how)
    assert again.left() == [case], "what failed is tried again by another run"
    again.add((case, "temporal"), case.cell() | {"goodput_rps": 0.0})
    (cell,) = again.results.cells
    assert "error" not in cell
    assert cell["tried"]["temporal"] == 0.0


QUICK = ("--quick", "--models", "qwen3-8b", "--policies", "chunked:512", "--seeds", "1", "--out")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--models", "nope"), 1, "preset 'nope'"),
        (("--policies", "prefill_first:nope=1"), 1, "has no nope"),
        (("--traces", "azure-code", "--traces-folder", "nowhere"), 1, "cannot be read"),
        (("--rungs", "200"), 1, "200"),
        (("--seeds", "0"), 2, "'--seeds'"),
        (("--jobs", "0"), 2, "'--jobs'"),
        (("--least", "0"), 2, "'--least'"),
        (("--seconds", "-5"), 2, "-5: give a finite number above 0"),
        (("--seconds", "nan"), 2, "nan: give a finite number above 0"),
    ],
)
def test_what_no_process_could_replay_is_said_before_one_starts(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    ran = CliRunner().invoke(command, [*QUICK, str(path), *words])
    assert ran.exit_code == code
    assert said in ran.output + str(ran.exception)
    assert not path.exists()


def test_a_run_with_failures_says_so(tmp_path: Path) -> None:
    words = ("--seconds", "1e9", "--traces", "sharegpt-like")
    ran = CliRunner().invoke(command, [*QUICK, str(tmp_path / "r.json"), *words])
    assert ran.exit_code == 1
    assert "failed, and are tried again with --resume: the first was" in ran.output
