"""The command's bookkeeping: what is left to measure, what is kept, where it stops."""

from dataclasses import dataclass, replace
from math import nan

import pytest
from click.testing import CliRunner

from smkern.autotune import gemm, main, raw
from smkern.autotune.raw import Measurement
from smkern.autotune.shortlist import Candidate, parse_epilogue, problems
from smkern.errors import DeviceError
from smkern.tuning import space, table
from smkern.tuning.config import Budget, Epilogue, GemmConfig
from smkern.tuning.cost_constants import DEFAULTS
from smkern.tuning.table import Cell, CellKey, Table, TableStore

META = dict.fromkeys(table.PROVENANCE, "x") | {"gpu": "NVIDIA H200"}
OURS, OTHER = GemmConfig("ws", 128, 128, 64, 8, 4), GemmConfig("tma", 64, 128, 64, 4, 4)


@dataclass(frozen=True)
class FakePlace:
    budget: Budget
    stream: None = None
    neighbour_stream: None = None


@pytest.fixture
def places():
    return [FakePlace(Budget(n, "mask", n > 66)) for n in (32, 100)]


def request_of(found, **changes):
    values = {
        "problems": found,
        "top": 4,
        "kernels": space.AVAILABLE,
        "cublaslt": True,
        "contended": False,
        "time_limit_s": float("inf"),
        "workers": 1,
    }
    return gemm.Request(**{**values, **changes})


@pytest.fixture
def jobs(profile, places, monkeypatch):
    monkeypatch.setattr(gemm, "load_constants", lambda gpu: DEFAULTS)
    request = request_of(problems([(4096, 4096), (6144, 4096)], [16, 512]))
    return lambda known=(): list(gemm._jobs(request, places, profile, list(known)))


def measured(job, us=10.0, **changes):
    found = [
        Measurement(job.problem, job.place.budget, c.config, us + i, 0.01, c.predicted_us)
        for i, c in enumerate(job.candidates)
    ]
    return [replace(item, **changes) for item in found]


def test_what_was_measured_is_not_measured_again(jobs):
    every = jobs()
    assert len(every) == 8
    counts = {len(job.candidates) for job in every}
    assert min(counts) >= 4
    assert len(counts) > 1, "cuBLASLt where clusters launch, twins where operands are swapped"
    first, second = every[0], every[1]
    known = [*measured(first), *measured(second)[1:]]
    left = jobs(known)
    assert len(left) == 7
    assert left[0].candidates == second.candidates[:1]
    assert left[0].known == measured(second)[1:]
    assert len(jobs([replace(item, contended=True) for item in known])) == 8


class FakeTuner:
    """Measures by the model; counts cells; the second candidate fails."""

    cells = 0

    def __init__(self, dispatcher, operands):
        pass

    def measure(self, problem, place, candidates, *, contended=False):
        type(self).cells += 1
        found = [
            Measurement(problem, place.budget, c.config, c.predicted_us, 0.01, c.predicted_us)
            for c in candidates
        ]
        if len(found) > 1:
            found[1] = replace(found[1], us=nan, noise=nan, error="wrong result")
        return found


@pytest.fixture
def fake_device(monkeypatch):
    import smkern.autotune.measure as measure
    import smkern.bench.operands as operands

    monkeypatch.setattr(measure, "CellTuner", FakeTuner)
    monkeypatch.setattr(operands, "Operands", lambda *args: None)
    monkeypatch.setattr(FakeTuner, "cells", 0)


def run(jobs, tmp_path, started=float("inf"), **changes):
    store, path = TableStore(tmp_path / "gemm.json"), tmp_path / "raw.jsonl"
    request = request_of([], **changes)
    gemm._measure_all(jobs, request, None, store, path, META, started)
    return store.load("NVIDIA H200"), raw.load(path) if path.exists() else []


def test_every_cell_lands_in_the_table_and_every_candidate_in_the_record(
    jobs, fake_device, tmp_path
):
    found, record = run(jobs(), tmp_path)
    assert FakeTuner.cells == len(found.cells) == 8
    assert len(record) == sum(len(job.candidates) for job in jobs())
    assert jobs(record) == [], "run again, nothing is left"
    for job in jobs():
        cell = found.cells[CellKey.of(job.problem, job.place.budget)]
        assert cell.own in {item.config for item in job.candidates}


def test_the_time_limit_keeps_what_was_measured(jobs, fake_device, tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(gemm.time, "monotonic", lambda: next(clock))
    found, record = run(jobs(), tmp_path, started=0, time_limit_s=5.0)
    assert 0 < len(found.cells) < 8
    assert len(found.cells) == FakeTuner.cells
    left = jobs(record)
    assert len(left) == 8 - len(found.cells)
    monkeypatch.undo()


def test_a_refined_cell_keeps_its_older_winner(jobs, tmp_path, fake_device):
    job = jobs()[0]
    older = measured(job, us=0.5)
    new = [Candidate(OTHER, 99.0), Candidate(OURS, 98.0)]
    refined = replace(job, candidates=new, known=older)
    assert [c.config for c in gemm._with_anchor(refined)] == [OTHER, OURS, older[0].config]
    found, _ = run([refined], tmp_path)
    cell = found.cells[older[0].key]
    # the older winner, timed again, took longer than the older second
    assert (cell.config, cell.us) == (older[1].config, older[1].us)


def test_the_library_must_win_clearly(jobs):
    from smkern.autotune.measure import best_cell

    job = jobs()[0]
    ours = replace(measured(job)[0], config=OURS, us=10.0)
    library = replace(ours, config=space.CUBLASLT, us=9.95)
    cell = best_cell([ours, library])
    assert (cell.config, cell.us, cell.own) == (OURS, 10.0, OURS)
    cell = best_cell([ours, replace(library, us=9.0)])
    assert (cell.config, cell.us, cell.own, cell.own_us) == (space.CUBLASLT, 9.0, OURS, 10.0)
    assert best_cell([library, replace(ours, error="wrong result", us=nan)]) is None


def test_dry_run_needs_no_gpu(profile, monkeypatch):
    monkeypatch.setattr(main, "load_profile", lambda: profile)
    result = CliRunner().invoke(main.command, ["--dry-run", "--quick", "--top", "4"])
    assert result.exit_code == 0, result.output
    assert "4 cells, at most 4 candidates each, for NVIDIA H200" in result.output
    assert "kernel variants to compile" in result.output


def test_gemm_swiglu_is_tuned_by_its_inner_width(profile, monkeypatch):
    asked = []
    monkeypatch.setattr(main, "load_profile", lambda: profile)
    monkeypatch.setattr(gemm, "describe", lambda request, *_: asked.extend(request.problems))
    arguments = ["--dry-run", "--op", "gemm_swiglu", "--shapes", "14336x4096", "--ms", "8,64"]
    result = CliRunner().invoke(main.command, arguments)
    assert result.exit_code == 0, result.output
    assert [(p.m, p.n, p.k, p.epilogue.key) for p in asked] == [
        (8, 28672, 4096, "swiglu"),
        (64, 28672, 4096, "swiglu"),
    ]


def test_swiglu_is_also_measured_unfused_and_as_the_plain_gemm_runs(places, profile):
    problem = problems([(28672, 4096)], [64], epilogues=[parse_epilogue("swiglu")])[0]
    today = GemmConfig("ws", 64, 64, 64, 4, 7, swap=True)
    plain = replace(problem, epilogue=Epilogue())
    kept = Table({}, {CellKey.of(plain, places[0].budget): Cell(today, 10.0, today, 10.0)})
    found = gemm._shortlist(request_of([]), problem, places[0].budget, profile, DEFAULTS, kept)
    configs = [candidate.config for candidate in found]
    assert space.UNFUSED in configs
    assert space.CUBLASLT not in configs
    assert configs[-1] == today


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(main.command, ["--quick"])
    assert isinstance(result.exception, DeviceError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epilogue", "relu"], "'relu' is no epilogue"),
        (["--kernels", "magic"], r"\['magic'\] are none of"),
        (["--top", "0"], "not in the range"),
        (["--shapes", "6144"], "is no NxK"),
    ],
)
def test_bad_options_are_named(arguments, message):
    result = CliRunner().invoke(main.command, ["--dry-run", *arguments])
    assert result.exit_code == 2
    assert __import__("re").search(message, result.output)
