"""The tuner of the experts' operators on a GPU: every candidate has the right result."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from smkern.autotune.main import command
from smkern.autotune.moe import GROUPED, GROUPED_OPS, MOE, MOE_OPS, cases_of
from smkern.device import device_info


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "family", "ops"), [("moe", MOE, MOE_OPS), ("grouped_gemm", GROUPED, GROUPED_OPS)]
)
def test_every_cell_has_a_winner_and_no_candidate_is_wrong(tmp_path, op, family, ops) -> None:
    out, record = tmp_path / f"{op}.json", tmp_path / "raw.jsonl"
    arguments = ["--op", op, "--ms", "64,1024", "--budgets", "16,132", "--confined", "both"]
    arguments += ["--out", str(out), "--raw", str(record)]
    ran = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert {line.get("error") for line in lines} == {None}
    cells = family.tuned.file(out).load(device_info().name).cells
    # 16 SMs by mask and by grid, and the whole device
    assert len(cells) == 3 * len(cases_of(ops, (64, 1024)))
    assert {key.confined for key in cells} == {"mask", "grid"}
    again = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "0 cells to measure" in again.output
