"""Attention's cells: buckets, neighbours that serve, files that are none, an operator's own."""

import json
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from smkern.errors import TableError
from smkern.profile import load_profile
from smkern.tuning import cells
from smkern.tuning.attention.key import AttentionKey, mean_kv_len
from smkern.tuning.attention.select import ATTENTION, AttentionTable
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget
from smkern.tuning.bucket_table import bucket
from smkern.tuning.cells import CellFile, Cells, FlatCodec, Tuned

META = dict.fromkeys(cells.PROVENANCE, "x") | {"gpu": "NVIDIA H200"}
DECODE = AttentionShape(64, 32, 8, 128, 16, 1, 4096, 64, 64 * 4096)
BUDGET = Budget(32, "mask", False)
TWO = AttentionConfig("cuda", teams=2)


def problem_of(**changes):
    return AttentionProblem(replace(DECODE, **changes))


def decode_of(batch, length):
    return problem_of(batch=batch, max_tokens=batch, max_kv_len=length, max_total_kv=batch * length)


def table_of(*found):
    return AttentionTable(
        {}, {AttentionKey.of(problem, BUDGET): Tuned(config, 9.0) for problem, config in found}
    )


def lookup(table, problem, budget):
    return ATTENTION.lookup(problem, budget, load_profile("h200"), table)


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_the_mean_length_counts_within_the_window():
    assert mean_kv_len(problem_of(max_kv_len=30_000)) == 4096
    assert mean_kv_len(problem_of(window=1000)) == 1001
    assert mean_kv_len(AttentionProblem(AttentionShape(0, 8, 8, 64, 16, 1, 0, 0, 0))) == 1


@pytest.mark.parametrize(
    ("batch", "length", "served"),
    [(64, 4096, True), (50, 3000, True), (16, 16384, True), (8, 4096, False), (64, 512, False)],
)
def test_a_cell_serves_two_octaves_around_it(batch, length, served):
    found = lookup(table_of((decode_of(64, 4096), TWO)), decode_of(batch, length), BUDGET)
    assert (found == TWO) is served


def test_the_nearest_cell_counts():
    one = AttentionConfig("cuda", teams=1)
    table = table_of((decode_of(64, 4096), TWO), (decode_of(16, 4096), one))
    assert lookup(table, decode_of(64, 4096), BUDGET) == TWO
    assert lookup(table, decode_of(16, 2048), BUDGET) == one


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, replace(BUDGET, num_sms=34)),
        ({}, replace(BUDGET, confined="grid")),
        ({"num_q_heads": 64}, BUDGET),
        ({"head_dim": 64}, BUDGET),
        ({"page_size": 32}, BUDGET),
        ({"max_q_len": 2048, "max_tokens": 2111}, BUDGET),
    ],
)
def test_anything_else_is_not_served(changes, budget):
    table = table_of((problem_of(), TWO))
    assert lookup(table, problem_of(), BUDGET) == TWO
    assert lookup(table, problem_of(**changes), budget) is None


@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig("triton", keys=32, num_warps=2, num_stages=5),
        AttentionConfig("cutlass"),
        AttentionConfig("cuda", teams=9),
    ],
)
def test_a_cell_that_would_turn_bits_or_not_run_serves_nothing(config):
    assert lookup(table_of((problem_of(), config)), problem_of(), BUDGET) is None


def test_round_trip_a_cell_a_line(tmp_path):
    file = ATTENTION.file(tmp_path / "attention.json")
    found = {
        AttentionKey.of(decode_of(batch, 4096), replace(BUDGET, num_sms=sms)): Tuned(TWO, batch / 7)
        for batch in (8, 64, 1)
        for sms in (48, 16)
    }
    file.merge(found, META)
    again = file.load("NVIDIA H200")
    assert again.cells.keys() == found.keys()
    assert all(cell.config == TWO for cell in again.cells.values())
    lines = file.path.read_text().splitlines()[1:-1]
    rows = [json.loads(line.rstrip(",")) for line in lines]
    assert [row["batch"] for row in rows] == [1, 1, 8, 8, 64, 64]
    assert rows[0]["config"] == {"kernel": "cuda", "teams": 2}


GOOD = CellFile("", ATTENTION.codec).dump(
    Cells(META, {AttentionKey.of(problem_of(), BUDGET): Tuned(TWO, 10.0)})
)
BAD = {
    "half-written": GOOD[: len(GOOD) // 2],
    "strange kernel": GOOD.replace('"cuda"', '"magic"'),
    "strange path": GOOD.replace('"decode"', '"verify"'),
    "strange type": GOOD.replace('"batch": 64', '"batch": "64"'),
    "missing key": GOOD.replace('"num_sms"', '"sms"'),
    "unknown field": GOOD.replace('"teams"', '"crews"'),
    "no configuration": GOOD.replace('{"kernel": "cuda", "teams": 2}', "3"),
    "no time": GOOD.replace('"us": 10.0', '"us": 0'),
    "foreign": GOOD.replace("H200", "A100"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_table_is_named_with_a_remedy(tmp_path, case):
    path = tmp_path / "attention.json"
    path.write_text(BAD[case])
    with pytest.raises(TableError, match="smkern autotune --out") as raised:
        ATTENTION.file(path).load("NVIDIA H200")
    assert str(path) in str(raised.value)


def test_users_cells_count_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "shipped_path", lambda gpu, op: tmp_path / f"shipped-{op}.json")
    monkeypatch.setattr(cells, "user_path", lambda gpu, op: tmp_path / f"user-{op}.json")
    key = AttentionKey.of(problem_of(), BUDGET)
    for name, us in (("shipped", 2.0), ("user", 1.0)):
        ATTENTION.file(tmp_path / f"{name}-attention.json").merge({key: Tuned(TWO, us)}, META)
    assert ATTENTION.load("NVIDIA H200").cells[key].us == 1.0


@dataclass(frozen=True, slots=True, order=True)
class CopyKey:
    op: str
    rows: int
    dtype: Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class CopyConfig:
    block: int
    wide: bool = False


def test_any_operator_can_have_cells(tmp_path):
    """A key and a configuration that are flat dataclasses are enough."""
    file = CellFile(tmp_path / "copy.json", FlatCodec(CopyKey, CopyConfig(0)))
    found = {CopyKey("copy", 8, "fp16"): Tuned(CopyConfig(0, wide=True), 1.5)}
    file.merge(found, META)
    assert file.load().cells == found
    assert '"config": {"block": 0, "wide": true}' in file.path.read_text()
