"""Files of tuned cells: round trips, killed and concurrent writers, files that are none."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from smkern.errors import TableError
from smkern.profile import load_profile
from smkern.tuning import cells, constraints
from smkern.tuning.attention.select import ATTENTION_FAMILY
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape
from smkern.tuning.cells import CellFile, Cells, FlatCodec, Tuned
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM_FAMILY
from smkern.tuning.table import Cell, CellKey

pytestmark = pytest.mark.slow

META = dict.fromkeys(cells.PROVENANCE, "x") | {"gpu": "NVIDIA H200"}
BUDGET = Budget(32, "mask", False)
CONFIG = GemmConfig("ws", 64, 128, 64, 4, 4, ctas_per_sm=2, split=0, group_m=4, max_ctas=30)
TWO = AttentionConfig("cuda", teams=2)


def cell(us: float = 10.0, config: GemmConfig = CONFIG) -> Cell:
    return Cell(config, us, config, us)


def key(m: int, num_sms: int = 32) -> CellKey:
    return CellKey.of(GemmProblem(m, 6144, 4096), replace(BUDGET, num_sms=num_sms))


def attention_key(batch, num_sms=32):
    shape = AttentionShape(batch, 32, 8, 128, 16, 1, 4096, batch, batch * 4096)
    return ATTENTION_FAMILY.key_of(AttentionProblem(shape), replace(BUDGET, num_sms=num_sms))


def test_round_trip_sorted_a_cell_a_line(tmp_path):
    store = GEMM_FAMILY.file(tmp_path / "h200" / "gemm.json")
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
    store = GEMM_FAMILY.file(tmp_path / "gemm.json")
    store.merge({key(8): cell(1.0), key(16): cell(2.0)}, META)
    store.merge({key(16): cell(3.0), key(32): cell(4.0)}, META | {"date": "later"})
    found = store.load()
    assert {k.m: c.us for k, c in found.cells.items()} == {8: 1.0, 16: 3.0, 32: 4.0}
    assert found.meta["date"] == "later"


def test_no_file_is_an_empty_table(tmp_path):
    assert GEMM_FAMILY.file(tmp_path / "gemm.json").load("NVIDIA H200").cells == {}


def test_a_flat_cell_is_its_key_its_time_and_what_differs_from_the_default(tmp_path):
    file = ATTENTION_FAMILY.file(tmp_path / "attention.json")
    found = {attention_key(batch, n): Tuned(TWO, 1.5) for batch in (8, 64, 1) for n in (48, 16)}
    file.merge(found, META)
    assert file.load("NVIDIA H200").cells == found
    lines = file.path.read_text().splitlines()[1:-1]
    rows = [json.loads(line.rstrip(",")) for line in lines]
    assert [row["batch"] for row in rows] == [1, 1, 8, 8, 64, 64]
    assert rows[0]["config"] == {"kernel": "cuda", "teams": 2}


@dataclass(frozen=True, slots=True, order=True)
class CopyKey:
    op: str
    rows: int
    dtype: Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class CopyConfig:
    block: int
    wide: bool = False


def test_words_that_all_lines_have_are_told_once(tmp_path):
    file = CellFile(tmp_path / "copy.json", FlatCodec(CopyKey, CopyConfig(0)))

    def add(*keys: CopyKey) -> str:
        file.merge({key: Tuned(CopyConfig(8), 1.5) for key in keys}, META)
        return file.path.read_text()

    whole = add(CopyKey("copy", 8, "fp16"))
    assert "shared" not in whole, "nothing is shared by one"
    text = add(CopyKey("copy", 9, "fp16"))
    assert '"shared": {"op": "copy", "dtype": "fp16"}' in text
    assert text.splitlines()[1] == '{"rows":8,"us":1.5,"config":{"block":8}},'
    text = add(CopyKey("copy", 9, "bf16"))
    assert '"shared": {"op": "copy"}' in text
    assert len(file.load().cells) == 3
    file.path.write_text(whole)
    assert [*file.load().cells] == [CopyKey("copy", 8, "fp16")]


def test_any_operator_can_have_cells(tmp_path):
    """A key and a configuration that are flat dataclasses are enough."""
    file = CellFile(tmp_path / "copy.json", FlatCodec(CopyKey, CopyConfig(0)))
    found = {CopyKey("copy", 8, "fp16"): Tuned(CopyConfig(0, wide=True), 1.5)}
    file.merge(found, META)
    assert file.load().cells == found
    assert '"config":{"block":0,"wide":true}' in file.path.read_text()


GOOD = {
    "gemm": (GEMM_FAMILY, {key(8): cell(), key(16): cell()}),
    "attention": (ATTENTION_FAMILY, {attention_key(64): Tuned(TWO, 10.0)}),
}
BAD = {
    "half-written": (r"(?s)^(.{100}).*", r"\1", "half-written"),
    "empty": (r"(?s).*", "", "half-written"),
    "no table": (r"(?s)^.*$", "[1, 2]", "is not a table"),
    "another format": ("smkern-table", "triton-cache", "is not a table"),
    "another version": ('"version": 1', '"version": 2', "has version 2"),
    "no cells": (r'(?s)"cells": .*', '"cells": 3}', "lacks its provenance or its cells"),
    "strange kernel": ('"kernel":"', '"kernel":"magic', "has an invalid cell"),
    "strange dtype": ('"dtype": ?"', '"dtype":"u', "has an invalid cell"),
    "strange words": (
        r'(, "shared": \{[^}]*\})?, "cells"',
        ', "shared": [], "cells"',
        "share is no object",
    ),
    "strange type": ('"num_sms":32', '"num_sms":"32"', "has an invalid cell"),
    "missing key": ('"num_sms"', '"sms"', "has an invalid cell"),
    "unknown field": ('"config":{', '"config":{"crews":2,', "has an invalid cell"),
    "no configuration": (r'"config":\{.*?\}', '"config":3', "has an invalid cell"),
    "no time": ('"us":10.0', '"us":0', "has an invalid cell"),
    "a time of nothing": ('"us":10.0', '"us":1e-200', "has an invalid cell"),
    "foreign": ("H200", "A100", "was tuned on 'NVIDIA A100'"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", GOOD)
def test_a_file_that_is_no_table_is_named_with_a_remedy(tmp_path, name, case):
    (family, found), (pattern, changed, message) = GOOD[name], BAD[case]
    file = family.file(tmp_path / "table.json")
    text = re.sub(pattern, changed, file.dump(Cells(META, found)), count=0)
    file.path.write_text(text)
    with pytest.raises(TableError, match=message) as raised:
        file.load("NVIDIA H200")
    assert str(file.path) in str(raised.value)
    assert "smkern autotune --out" in str(raised.value)
    with pytest.raises(TableError):
        file.merge(found, META)
    assert file.path.read_text() == text, "a file that is not ours must not be overwritten"


def test_binary_is_no_table(tmp_path):
    path = tmp_path / "gemm.json"
    path.write_bytes(b"\xff\xfe\x00table")
    with pytest.raises(TableError, match="cannot be read"):
        GEMM_FAMILY.file(path).load()


def test_provenance_is_demanded(tmp_path):
    with pytest.raises(TableError, match=r"without its provenance.*driver"):
        GEMM_FAMILY.file(tmp_path / "gemm.json").merge({key(1): cell()}, {"gpu": "NVIDIA H200"})


WRITER = """
import sys
from pathlib import Path
from smkern.tuning.cells import PROVENANCE
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM_FAMILY
from smkern.tuning.table import Cell, CellKey
store = GEMM_FAMILY.file(Path(sys.argv[1]))
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
    store = GEMM_FAMILY.file(path)
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
    assert sorted(k.m for k in GEMM_FAMILY.file(path).load().cells) == list(range(30))


def test_users_cells_count_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "shipped_path", lambda gpu, op: tmp_path / "shipped.json")
    monkeypatch.setattr(cells, "user_path", lambda gpu, op: tmp_path / "user.json")
    GEMM_FAMILY.file(tmp_path / "shipped.json").merge({key(8): cell(1), key(16): cell(2)}, META)
    GEMM_FAMILY.file(tmp_path / "user.json").merge({key(16): cell(3)}, META)
    found = GEMM_FAMILY.load(load_profile("h200"))
    assert {k.m: c.us for k, c in found.cells.items()} == {8: 1.0, 16: 3.0}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"split": -3}, "split is -3"),
        ({"block_k": 0}, "has_tile"),
        ({"num_stages": 0}, "has_stages"),
        ({"num_warps": 6}, "has_warps"),
        ({"ctas_per_sm": 0}, "has_residency"),
        ({"num_stages": 6}, "fits_shared"),
        ({"split": 4096}, "has_pieces"),
        ({"group_m": 0}, "has_groups"),
        ({"max_ctas": 2**40}, "max_ctas is"),
        ({"kernel": "unfused", "block_k": 0}, "division"),
        ({"kernel": "unfused"}, "serves_swiglu"),
        ({"kernel": "cublaslt"}, "serves_library"),
    ],
)
def test_a_cell_that_the_tuner_would_not_make_is_refused(tmp_path, monkeypatch, changes, broken):
    monkeypatch.setattr(cells, "user_path", lambda gpu, op: tmp_path / "user.json")
    GEMM_FAMILY.file(tmp_path / "user.json").merge({key(64): cell(2)}, META)
    assert key(64) in GEMM_FAMILY.load(load_profile("h200")).cells
    line = GEMM_FAMILY.codec.encode(key(64), cell(2))
    line["config"] |= changes
    head, _, *rest = (tmp_path / "user.json").read_text().split("\n")
    (tmp_path / "user.json").write_text("\n".join([head, json.dumps(line), *rest]))
    with pytest.raises(TableError, match=f"invalid cell.*{broken}.*tune again"):
        GEMM_FAMILY.load(load_profile("h200"))


def test_a_librarys_cell_names_our_own_fastest_too(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "user_path", lambda gpu, op: tmp_path / "user.json")
    wide = CellKey.of(GemmProblem(64, 6144, 4096), Budget(32, "mask", True))
    file = GEMM_FAMILY.file(tmp_path / "user.json")
    found = Cell(constraints.CUBLASLT, 5.0, CONFIG, 6.0)
    file.merge({wide: found}, META)
    assert GEMM_FAMILY.load(load_profile("h200")).cells[wide] == found
    file.merge({wide: Cell(constraints.CUBLASLT, 5.0, constraints.CUBLASLT, 5.0)}, META)
    with pytest.raises(TableError, match="breaks own"):
        GEMM_FAMILY.load(load_profile("h200"))


def test_folders_are_named_by_gpu():
    assert cells.shipped_path("NVIDIA H200").parts[-2:] == ("h200", "gemm.json")
