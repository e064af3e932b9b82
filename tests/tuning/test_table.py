"""The table store: round trips, look-ups, killed and concurrent writers, files that are none."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smkern.errors import TableError
from smkern.tuning import cells, constraints
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS, load_constants
from smkern.tuning.select import GEMM
from smkern.tuning.table import Cell, CellKey, Table

META = dict.fromkeys(cells.PROVENANCE, "x") | {"gpu": "NVIDIA H200"}
BUDGET = Budget(32, "mask", False)
CONFIG = GemmConfig("ws", 64, 128, 64, 4, 6, ctas_per_sm=2, split=0, group_m=4, max_ctas=30)


def cell(us: float = 10.0, config: GemmConfig = CONFIG) -> Cell:
    return Cell(config, us, config, us)


def key(m: int, num_sms: int = 32) -> CellKey:
    return CellKey.of(GemmProblem(m, 6144, 4096), replace(BUDGET, num_sms=num_sms))


def test_round_trip_sorted_a_cell_a_line(tmp_path):
    store = GEMM.file(tmp_path / "h200" / "gemm.json")
    found = {
        key(m, n): cell(m + n, replace(CONFIG, swap=m == 8))
        for m in (8, 1024, 64)
        for n in (48, 16)
    }
    found[key(77)] = Cell(constraints.CUBLASLT, 5.0, CONFIG, 6.5)
    store.merge(found, META)
    loaded = store.load("NVIDIA H200")
    assert loaded.cells == found
    assert loaded.meta == META
    lines = store.path.read_text().splitlines()[1:-1]
    assert len(lines) == len(found)
    rows = [json.loads(line.rstrip(",")) for line in lines]
    assert [row["m"] for row in rows] == sorted(row["m"] for row in rows)
    assert not list(store.path.parent.glob(".*.part"))


def test_merge_keeps_other_cells_and_replaces_its_own(tmp_path):
    store = GEMM.file(tmp_path / "gemm.json")
    store.merge({key(8): cell(1.0), key(16): cell(2.0)}, META)
    store.merge({key(16): cell(3.0), key(32): cell(4.0)}, META | {"date": "later"})
    found = store.load()
    assert {k.m: c.us for k, c in found.cells.items()} == {8: 1.0, 16: 3.0, 32: 4.0}
    assert found.meta["date"] == "later"


def test_no_file_is_an_empty_table(tmp_path):
    assert GEMM.file(tmp_path / "gemm.json").load("NVIDIA H200").cells == {}


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


GOOD = GEMM.file(Path()).dump(cells.Cells(META, {key(8): cell(), key(16): cell()}))
BAD = {
    "half-written": (GOOD[: len(GOOD) // 2], "half-written"),
    "empty": ("", "half-written"),
    "no table": ("[1, 2]", "is not a table"),
    "another format": (GOOD.replace("smkern-table", "triton-cache"), "is not a table"),
    "another version": (GOOD.replace('"version": 1', '"version": 2'), "has version 2"),
    "no cells": (json.dumps(json.loads(GOOD) | {"cells": 3}), "lacks its provenance or its cells"),
    "strange kernel": (GOOD.replace('"ws"', '"magic"'), "has a cell that is none"),
    "strange type": (GOOD.replace('"m": 8', '"m": "8"'), "has a cell that is none"),
    "missing key": (GOOD.replace('"num_sms"', '"sms"'), "has a cell that is none"),
    "unknown field": (GOOD.replace('"num_stages"', '"stages"'), "has a cell that is none"),
    "negative time": (GOOD.replace('"us": 10.0', '"us": -1'), "has a cell that is none"),
    "foreign": (GOOD.replace("H200", "A100"), "was tuned on 'NVIDIA A100'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_table_is_named_with_a_remedy(tmp_path, case):
    text, message = BAD[case]
    path = tmp_path / "gemm.json"
    path.write_text(text)
    with pytest.raises(TableError, match=message) as raised:
        GEMM.file(path).load("NVIDIA H200")
    assert str(path) in str(raised.value)
    assert "smkern autotune --out" in str(raised.value)
    with pytest.raises(TableError):
        GEMM.file(path).merge({key(1): cell()}, META)
    assert path.read_text() == text, "a file that is not ours must not be overwritten"


def test_binary_is_no_table(tmp_path):
    path = tmp_path / "gemm.json"
    path.write_bytes(b"\xff\xfe\x00table")
    with pytest.raises(TableError, match="cannot be read"):
        GEMM.file(path).load()


def test_provenance_is_demanded(tmp_path):
    with pytest.raises(TableError, match=r"without its provenance.*driver"):
        GEMM.file(tmp_path / "gemm.json").merge({key(1): cell()}, {"gpu": "NVIDIA H200"})


WRITER = """
import sys
from pathlib import Path
from smkern.tuning.cells import PROVENANCE
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM
from smkern.tuning.table import Cell, CellKey
store = GEMM.file(Path(sys.argv[1]))
meta = dict.fromkeys(PROVENANCE, "x") | {"gpu": "NVIDIA H200"}
config = GemmConfig("ws", 64, 128, 64)
first, last, repeats = map(int, sys.argv[2:5])
for _ in range(repeats):
    for m in range(first, last):
        key = CellKey.of(GemmProblem(m, 6144, 4096), Budget(32, "mask", False))
        store.merge({key: Cell(config, 1.0, config, 1.0)}, meta)
print("done", flush=True)
"""


def start_writer(path, first, last, repeats):
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(last), str(repeats)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_at_any_moment_leaves_a_whole_table(tmp_path):
    path = tmp_path / "gemm.json"
    store = GEMM.file(path)
    many = {key(m, n): cell() for m in range(1, 60) for n in range(2, 64, 2)}
    store.merge(many, META)
    for attempt in range(4):
        writer = start_writer(path, 100, 104, 10_000)
        before = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == before and writer.poll() is None:
            time.sleep(0.002)
        time.sleep(0.007 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = store.load("NVIDIA H200")
        assert many.keys() <= found.cells.keys()
    store.merge({key(200): cell()}, META)  # the dead writer's lock and leavings are no obstacle
    assert key(200) in store.load().cells
    assert not list(tmp_path.glob(".*.part"))


def test_two_writers_lose_nothing(tmp_path):
    path = tmp_path / "gemm.json"
    writers = [start_writer(path, 0, 15, 1), start_writer(path, 15, 30, 1)]
    assert [writer.communicate(timeout=60)[0] for writer in writers] == ["done\n", "done\n"]
    assert sorted(k.m for k in GEMM.file(path).load().cells) == list(range(30))


def test_users_cells_count_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "shipped_path", lambda gpu, op: tmp_path / "shipped.json")
    monkeypatch.setattr(cells, "user_path", lambda gpu, op: tmp_path / "user.json")
    GEMM.file(tmp_path / "shipped.json").merge({key(8): cell(1), key(16): cell(2)}, META)
    GEMM.file(tmp_path / "user.json").merge({key(16): cell(3)}, META)
    found = GEMM.load("NVIDIA H200")
    assert {k.m: c.us for k, c in found.cells.items()} == {8: 1.0, 16: 3.0}


def test_folders_are_named_by_gpu():
    assert cells.shipped_path("NVIDIA H200").parts[-2:] == ("h200", "gemm.json")


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


def test_a_cell_serves_no_batch_of_less_than_half_its_rows():
    """What is best for 64 rows takes a third longer for one."""
    found = Table(cells={key(64): cell()})
    rows = {m: found.lookup(GemmProblem(m, 6144, 4096), BUDGET) for m in (1, 31, 32, 64)}
    assert {m for m, config in rows.items() if config} == {32, 64}
