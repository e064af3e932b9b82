"""The sampler's tuner: cases, candidates, a cell on CPU tensors, the table, the command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from click.testing import CliRunner

from smkern.autotune import main, sample
from smkern.autotune.measure import best_cell
from smkern.autotune.sample import SampleCase
from smkern.device import Budget
from smkern.ops.sample.call import problem_of
from smkern.tuning.cells import Tuned
from smkern.tuning.sample import SAMPLING, SampleConfig, SampleKey, SampleProblem
from tests.measure.fake_cuda import FakeCuda


@dataclass(frozen=True)
class FakePlace:
    budget: Budget
    stream: Any = None
    neighbour_stream: None = None


def test_cases_are_distinct_cells() -> None:
    cases = sample.tuned_cases()
    keys = {SampleKey.of(case.problem, Budget(16)) for case in cases}
    assert len(keys) == len(cases) == 2 * len(sample.ROWS)
    near = {SampleKey.of(SampleProblem(1, vocab), Budget(16)) for vocab in (151_936, 152_064)}
    assert len(near) == 1


def test_a_case_is_its_calls() -> None:
    calls = sample.calls_of(SampleCase(16, 4096), "cpu")
    assert replace(problem_of(calls[0], True), rows=8) == SampleCase(8, 4096).problem
    assert calls[0].temperature.tolist().count(0.0) == 2
    assert len({call.logits.data_ptr() for call in calls}) == len(calls) > 1


@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_candidates_begin_with_the_models_choice(profile: Any, confined: Any) -> None:
    for case in sample.tuned_cases():
        problem, budget = case.problem, Budget(32, confined)
        found = list(sample.FAMILY.wanted(problem, budget, profile))
        assert found[0] == SAMPLING.choose(problem, budget, profile)
        assert len(set(found)) == len(found)
        assert all(SAMPLING.is_legal(problem, config, budget, profile) for config in found)
        assert any(not config.pdl for config in found) == (confined == "mask")


class Dispatcher:
    """Launches run the reference on the calls; one configuration is wrong, one fails."""

    def __init__(self, profile: Any, cuda: FakeCuda) -> None:
        self.profile, self.cuda = profile, cuda
        self.tuner: Any = None
        self.wrong: Any = None
        self.failing: Any = None

    def launch_by(self, config: SampleConfig, problem: Any, budget: Budget, capturing: bool) -> Any:
        if config == self.failing:
            raise RuntimeError("no room")

        def launch(stream: int, *given: Any) -> None:
            self.cuda.work_us(10.0 + config.num_warps)
            (call,) = [x for x in self.tuner.calls if x[0].data_ptr() == given[0]]
            call.out.copy_(self.tuner.op.reference(call))
            if config == self.wrong:
                call.out[0] += 1

        return launch


def test_a_cell_is_measured_and_checked(profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(SampleCase, "num_sets", 2)
    dispatcher = Dispatcher(profile, cuda)
    case = SampleCase(8, 500)
    tuner: Any = sample.FAMILY.tuner([case], dispatcher, "cpu")
    dispatcher.tuner = tuner
    stream: Any = cuda.new_stream()
    stream.cuda_stream = 0
    place: Any = FakePlace(Budget(16, "mask"), stream)
    wanted = sample.FAMILY.wanted(case.problem, place.budget, profile)
    _, dispatcher.wrong, dispatcher.failing, *_ = wanted
    found = tuner.measure(case.problem, place, wanted)
    assert [item.config for item in found] == list(wanted)
    assert found[1].error == "other bits than another candidate"
    assert found[2].error == "RuntimeError: no room"
    row = found[0].to_json()
    assert (row["op"], row["vocab"], row["num_sms"]) == ("sample", 500, 16)
    best = best_cell(found)
    assert best is not None
    assert best.us <= 1.015 * min(item.us for item in found if item.error is None)


def test_what_is_tuned_is_what_dispatch_takes(profile: Any, tmp_path: Any) -> None:
    problem, budget = SampleProblem(128, 151_936), Budget(32, "mask")
    names = ("driver", "torch", "triton", "smkern_commit", "date", "command")
    file = SAMPLING.file(tmp_path / "sample.json")
    tuned = SampleConfig(8, 2, pdl=False)
    cells = {SampleKey.of(problem, budget): Tuned(tuned, 2.0)}
    file.merge(cells, dict.fromkeys(names, "x") | {"gpu": "g"})
    table = SAMPLING.table_of(file.load("g"))
    for rows in (128, 100, 256):
        assert SAMPLING.config(replace(problem, rows=rows), budget, profile, table) == tuned
    other = replace(problem, vocab=32_000)
    assert SAMPLING.config(other, budget, profile, table) == SAMPLING.choose(other, budget, profile)


def test_dry_run_says_what_would_be_measured() -> None:
    command = ["--op", "sample", "--dry-run", "--quick", "--budgets", "16,32"]
    ran = CliRunner().invoke(main.command, command)
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines()[-1].startswith("8 cells")
