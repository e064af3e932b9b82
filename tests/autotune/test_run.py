"""One operator tuned: what a run says, measures and saves, when, and where it stops."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from smkern.autotune import append, attention, run, sample
from smkern.autotune.attention_cases import Heads, tuned_cases
from smkern.autotune.gemm import FAMILY, GemmCase
from smkern.autotune.operators import OperatorCells
from smkern.autotune.sample import SampleCase
from smkern.errors import TableError
from smkern.tuning.cells import CellFile
from smkern.tuning.config import GemmProblem
from tests.autotune.fakes import FakeDevice, fake_opened

SMALL = Heads(8, 2, 64)
FAMILIES = {
    "gemm": (FAMILY, [GemmCase(GemmProblem(m, 1024, 512)) for m in (16, 512)]),
    "attention": (attention.FAMILY, tuned_cases([SMALL])[:2]),
    "append": (append.FAMILY, append.tuned_cases([SMALL])[:2]),
    "sample": (sample.FAMILY, [SampleCase(n, 151_936) for n in (8, 128)]),
}


class Bench:
    """An operator's run on a device that is not there, into tables of a folder."""

    def __init__(self, op, profile, folder, monkeypatch):
        self.device = FakeDevice(profile).install(monkeypatch)
        family, self.cases = FAMILIES[op]
        self.op, self.family, self.folder = op, self.device.family(family), folder
        work = OperatorCells(self.family, self.cases, (16, 100))
        monkeypatch.setattr(run, "OPERATORS", {op: lambda options: work})
        monkeypatch.setattr(run, "opened", fake_opened(self.device))
        gpu = SimpleNamespace(name=profile.info.name)
        monkeypatch.setattr(run, "device_info", lambda: gpu)

    def tune(self, *, seconds=float("inf"), fresh=False):
        self.device.log.clear()
        out = self.folder / "table.json"
        asked = run.Settings(None, fresh, False, out, 1, seconds)
        run.tune_operator(asked, op=self.op, confined="mask", raw_path=None)
        return list(self.device.log)

    def saved(self):
        return self.family.tuned.file(self.folder / "table.json").load()


@pytest.fixture(params=FAMILIES)
def bench(request, profile, tmp_path, monkeypatch):
    return Bench(request.param, profile, tmp_path, monkeypatch)


def test_a_case_after_the_other_and_one_table(bench, capsys):
    events = bench.tune()
    first, second = (case.name for case in bench.cases)
    cells = [("cell", 16), ("cell", 100)]
    apart = [("tuner", first), *cells, ("trim",), ("tuner", second), *cells, ("trim",)]
    together = [("tuner", first, second), *cells, *cells, ("trim",)]
    measured = [event for event in events if event[0] not in ("compile", "compiler closed")]
    assert measured == (together if bench.op == "gemm" else apart)
    assert events[-1] == ("compiler closed",)
    out = capsys.readouterr().out
    assert out.startswith("4 cells to measure, 0 are in the table\n")
    assert "4 cells in " in out
    assert "every candidate in " in out
    assert len(bench.saved().cells) == 4
    assert len((bench.folder / "table.raw.jsonl").read_text().splitlines()) >= 4


def test_what_the_table_has_is_measured_again_only_when_asked(bench):
    bench.tune()
    bench.tune()
    assert bench.device.cells() == []
    bench.tune(fresh=True)
    assert len(bench.device.cells()) == 4


def test_the_table_is_written_every_ten_seconds(bench, monkeypatch):
    saves, merge = [], CellFile.merge

    def noted(self, cells, meta):
        saves.append(len(cells))
        return merge(self, cells, meta)

    monkeypatch.setattr(CellFile, "merge", noted)
    bench.device.cell_s = 6.0
    bench.tune()
    assert saves == [2, 2]


def test_the_time_limit_keeps_what_was_measured(bench, capsys):
    bench.tune(seconds=2.5)
    assert len(bench.saved().cells) == len(bench.device.cells()) == 3
    assert "the time is up: 1 cells left; the same command goes on" in capsys.readouterr().out
    bench.tune()
    assert len(bench.device.cells()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_cell_that_runs(bench, capsys, number):
    before = signal.getsignal(number)
    bench.device.after_cell = lambda: signal.raise_signal(number)
    bench.tune()
    assert len(bench.saved().cells) == 1
    assert f"stopped by {number.name}: 3 cells left" in capsys.readouterr().out
    assert signal.getsignal(number) is before


def test_an_interruption_in_the_middle_leaves_what_was_measured(bench):
    def interrupt():
        if len(bench.device.cells()) == 3:
            raise KeyboardInterrupt

    bench.device.after_cell = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.tune()
    assert len(bench.saved().cells) == 2
    assert bench.device.log[-1] == ("compiler closed",)


def test_a_full_disk_is_named_and_leaves_the_table_as_it_was(bench, monkeypatch):
    bench.tune(seconds=1.5)
    before = (bench.folder / "table.json").read_text()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(TableError, match=r"table.json cannot be written \(No space left.*--out"):
        bench.tune()
    assert (bench.folder / "table.json").read_text() == before


def test_a_foreign_table_is_found_before_anything_is_measured(bench, monkeypatch):
    bench.tune()
    path = bench.folder / "table.json"
    path.write_text(path.read_text().replace(bench.device.profile.info.name, "NVIDIA H100"))
    with pytest.raises(TableError, match="was tuned on 'NVIDIA H100'"):
        bench.tune()
    assert bench.device.cells() == []


def test_a_cell_where_nothing_ran_is_said_and_left_out(bench, capsys):
    bench.device.failing = (100,)
    bench.tune()
    error = capsys.readouterr().err
    assert [line.split(":")[-1] for line in error.splitlines()] == [" no luck", " no luck"]
    assert bench.cases[0].name in error
    assert {key.num_sms for key in bench.saved().cells} == {16}
