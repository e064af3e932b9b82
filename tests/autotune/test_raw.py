"""The record of every measured candidate."""

import gzip
import subprocess
import sys
from dataclasses import replace
from math import isnan, nan
from types import SimpleNamespace

import pytest
from filelock import FileLock

from smkern.autotune import raw
from smkern.autotune.raw import Measurement
from smkern.autotune.tables import Tables
from smkern.errors import TableError
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem

GOOD = Measurement(
    GemmProblem(64, 6144, 4096, "fp16", Epilogue(bias=True, activation="silu")),
    Budget(32, "mask", False),
    GemmConfig("ws", 64, 128, 64, swap=True, split=0, eager=True),
    12.5,
    0.01,
    11.25,
)


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "raw.jsonl"
    failed = replace(GOOD, us=nan, noise=nan, error="wrong result")
    other = replace(GOOD, us=13.5)
    raw.append(path, [GOOD])
    raw.append(path, [other, failed])
    first, second, third = raw.load(path)
    assert (first, second) == (GOOD, other)
    assert isnan(third.us)
    assert third.error == "wrong result"


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = tmp_path / "raw.jsonl"
    raw.append(path, [GOOD, GOOD])
    path.write_text(path.read_text()[:-30])
    assert raw.load(path) == [GOOD]


def test_another_bad_line_is_named(tmp_path):
    path = tmp_path / "raw.jsonl"
    raw.append(path, [GOOD])
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(TableError, match=r"raw.jsonl, line 1 is no measurement.*delete the line"):
        raw.load(path)


def test_lines_after_a_half_written_one_start_afresh(tmp_path):
    path = tmp_path / "raw.jsonl"
    raw.append(path, [GOOD])
    path.write_text(path.read_text() + '{"op": "ge')
    raw.append(path, [GOOD])
    assert raw.load(path) == [GOOD, GOOD]


def test_tuners_at_once_lose_no_line(tmp_path):
    path = tmp_path / "raw.jsonl"
    add = f"""
from pathlib import Path
from smkern.autotune import raw
from tests.autotune.test_raw import GOOD
for _ in range(200):
    raw.append(Path({str(path)!r}), [GOOD] * 2)
"""
    tuners = [subprocess.Popen([sys.executable, "-c", add]) for _ in range(3)]
    assert [tuner.wait() for tuner in tuners] == [0, 0, 0]
    assert raw.load(path) == [GOOD] * 1200


def test_a_lock_that_another_process_holds_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "LOCK_S", 0.01)
    tables = Tables("NVIDIA H200", lambda name: tmp_path / f"{name}.json")
    job = SimpleNamespace(family=SimpleNamespace(name="gemm"))
    with (
        FileLock(tmp_path / "gemm.raw.jsonl.lock"),
        pytest.raises(TableError, match=r"gemm.raw.jsonl cannot be written.*held gemm.raw.jsonl.l"),
    ):
        tables.keep(job, [GOOD])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "raw.jsonl"
    raw.append(path, [GOOD] * 20)
    packed = gzip.compress(path.read_bytes(), mtime=0)
    for contents in (packed[:-9], packed[:10] + b"\xff" * 20, b"plain"):
        cut = tmp_path / "cut.jsonl.gz"
        cut.write_bytes(contents)
        with pytest.raises(TableError, match=r"cut.jsonl.gz cannot be read .*whole file"):
            raw.load(cut)
    with pytest.raises(TableError, match=r"none.jsonl cannot be read .*No such file"):
        raw.load(tmp_path / "none.jsonl")
