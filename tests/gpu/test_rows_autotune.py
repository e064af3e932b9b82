"""The tuner of operators over rows on a GPU: every candidate has the right bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.autotune.main import command
from smkern.autotune.rows import tuned_cases
from smkern.device import device_info
from smkern.tuning.rows import ROWS


@pytest.mark.slow
def test_every_cell_has_a_winner_and_no_candidate_is_wrong(tmp_path: Path) -> None:
    out, record = tmp_path / "rows.json", tmp_path / "raw.jsonl"
    arguments = ["--op", "rows", "--ms", "16,700", "--budgets", "16,132", "--confined", "both"]
    arguments += ["--out", str(out), "--raw", str(record)]
    ran = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert {line.get("error") for line in lines} == {None}
    cells = ROWS.file(out).load(device_info().name).cells
    # 16 SMs by mask and by grid, and the whole device
    assert len(cells) == 3 * len(tuned_cases(rows=(16, 700)))
    assert all(0.5 < cell.us < 5000 for cell in cells.values())
    assert {key.confined for key in cells} == {"mask", "grid"}
    again = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "0 cells to measure" in again.output
