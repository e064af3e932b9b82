"""A sitting of the tuner, attention's and the append's: what it says, measures and saves, when."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from types import SimpleNamespace

import pytest

from smkern.autotune import append, attention
from smkern.autotune.append import AppendMeasurement
from smkern.autotune.attention_cases import Heads, problem_of, tuned_cases
from smkern.autotune.attention_measure import AttentionMeasurement
from smkern.device import Budget
from smkern.tuning.cells import CellFile

META = dict.fromkeys(("driver", "torch", "triton", "smkern_commit", "date"), "x")
SMALL = Heads(8, 2, 64)


@dataclass(frozen=True)
class FakePlace:
    budget: Budget
    stream: object = None
    neighbour_stream: object = None


@dataclass
class FakePlaces:
    """Two budgets with a partition, the larger without a neighbour; others have none."""

    budgets: tuple[int, ...]
    confined: tuple[str, ...]
    missing: list[int] = field(default_factory=list)

    def __enter__(self):
        self.missing += [n for n in self.budgets if n not in (16, 100)]
        return [FakePlace(Budget(16, "mask"), None, "s"), FakePlace(Budget(100, "mask"))]

    def __exit__(self, *error):
        pass


class Log(list):
    """What happened, in order."""

    def note(self, *what):
        self.append(what)


def of_attention(monkeypatch, log, dispatcher, measured):
    class Tuner:
        def __init__(self, given, operands):
            assert given is dispatcher
            self.case = operands
            log.note("tuner", operands.name)

        def measure(self, place, candidates, *, contended):
            log.note("cell", place.budget.num_sms, contended)
            problem = problem_of(self.case)
            return measured(AttentionMeasurement, problem, place.budget, candidates)

    monkeypatch.setattr("smkern.autotune.attention_measure.AttentionTuner", Tuner)
    monkeypatch.setattr("smkern.bench.attention.operands.AttentionOperands", lambda case: case)
    monkeypatch.setattr(
        "smkern.ops.attention.eager.eager_attention",
        lambda device: SimpleNamespace(dispatcher=dispatcher),
    )
    monkeypatch.setattr(attention, "precompile", lambda jobs, _: log.note("compile", len(jobs)))
    return attention, tuned_cases([SMALL])[:2]


def of_append(monkeypatch, log, dispatcher, measured):
    class Tuner:
        def __init__(self, given, operands):
            assert given is dispatcher
            self.case = operands
            log.note("tuner", operands.name)

        def measure(self, place, *, contended):
            log.note("cell", place.budget.num_sms, contended)
            problem = append.shape_of(self.case)
            listed = append.listed(problem, place.budget, dispatcher.profile)
            return measured(AppendMeasurement, problem, place.budget, listed)

    monkeypatch.setattr(append, "AppendTuner", Tuner)
    monkeypatch.setattr(append, "AppendOperands", lambda case: case)
    monkeypatch.setattr(
        "smkern.ops.append.eager.eager_append",
        lambda device: SimpleNamespace(dispatcher=dispatcher),
    )
    return append, append.tuned_cases([SMALL])[:2]


@dataclass
class Bench:
    """An operator's tuner on a device that is not there; a cell takes `cell_s` of its clock."""

    tuner: object
    cases: list
    log: Log
    folder: object
    cell_s: float = 1.0
    failing: tuple[int, ...] = ()

    def tune(self, *, contended=False, limit_s=float("inf"), budgets=(16, 100), fresh=False):
        self.log.clear()
        request = self.tuner.Request(self.cases, budgets, ("mask",), contended, limit_s, "c")
        out, raw_path = self.folder / "table.json", self.folder / "raw.jsonl"
        self.tuner.tune(request, out, raw_path, fresh=fresh)
        return list(self.log)

    def cells(self):
        return CellFile(self.folder / "table.json", self.tuner.CODEC).load().cells


@pytest.fixture(params=[of_attention, of_append], ids=["attention", "append"])
def bench(request, monkeypatch, profile, tmp_path):
    log, clock = Log(), [0.0]

    def measured(kind, problem, budget, configs):
        clock[0] += made.cell_s
        if budget.num_sms in made.failing:
            return [kind(problem, budget, x, nan, nan, 1.0, "no luck") for x in configs]
        return [kind(problem, budget, x, 10.0 + n, 0.0, 1.0) for n, x in enumerate(configs)]

    merge = CellFile.merge

    def noted(self, cells, meta):
        log.note("save", len(cells), meta["command"], meta["contended"])
        return merge(self, cells, meta)

    tuner, cases = request.param(monkeypatch, log, SimpleNamespace(profile=profile), measured)
    made = Bench(tuner, cases, log, tmp_path)
    gpu = {"gpu": profile.info.name}
    monkeypatch.setattr("smkern.autotune.places.Places", FakePlaces)
    monkeypatch.setattr("smkern.bench.results.collect_meta", lambda: META | gpu)
    monkeypatch.setattr("smkern.bench.stage.trim_memory", lambda device: log.note("trim"))
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(CellFile, "merge", noted)
    return made


def without_compile(events):
    """Only attention compiles ahead: CUDA variants, before the first tuner."""
    return [event for event in events if event[0] != "compile"]


def test_a_case_after_the_other_and_one_table(bench, capsys):
    events = bench.tune()
    first, second = (case.name for case in bench.cases)
    cells = [("cell", 16, False), ("cell", 100, False)]
    assert without_compile(events) == [
        ("tuner", first), *cells, ("trim",), ("tuner", second), *cells, ("trim",),
        ("save", 4, "c", False),
    ]  # fmt: skip
    assert (events[0] == ("compile", 4)) == (bench.tuner is attention)
    out = capsys.readouterr().out
    assert out.startswith("4 cells to measure\n")
    assert "4 cells in " in out
    assert "every candidate in " in out
    assert [cell.us for cell in bench.cells().values()] == [10.0] * 4
    assert len((bench.folder / "raw.jsonl").read_text().splitlines()) >= 4


def test_what_the_table_has_is_measured_again_only_when_asked(bench):
    bench.tune()
    assert without_compile(bench.tune()) == []
    assert len([event for event in bench.tune(fresh=True) if event[0] == "cell"]) == 4


def test_the_table_is_written_every_ten_seconds(bench):
    bench.cell_s = 6.0
    saves = [event[1] for event in bench.tune() if event[0] == "save"]
    assert saves == [2, 2]


def test_the_time_limit_keeps_what_was_measured(bench, capsys):
    events = bench.tune(limit_s=2.5)
    assert [event[0] for event in events][-1] == "save"
    assert len(bench.cells()) == 3
    assert "time limit: 1 cells left; run the same command again" in capsys.readouterr().out
    assert len([event for event in bench.tune() if event[0] == "cell"]) == 1


def test_a_cell_where_nothing_ran_is_said_and_left_out(bench, capsys):
    bench.failing = (100,)
    bench.tune()
    error = capsys.readouterr().err
    assert [line.split(":")[-1] for line in error.splitlines()] == [" no luck", " no luck"]
    assert bench.cases[0].name in error
    assert {key.num_sms for key in bench.cells()} == {16}


def test_contended_takes_places_with_a_neighbour(bench, capsys):
    events = bench.tune(contended=True, budgets=(16, 30, 100))
    assert [event for event in events if event[0] == "cell"] == [("cell", 16, True)] * 2
    assert ("save", 2, "c", True) in events
    assert "no partition of [30] SMs on this device: left out\n2 cells" in capsys.readouterr().out
