"""The tuner of the operators over rows: cases, candidates, a cell on CPU tensors, the command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from smkern.autotune import main, rows
from smkern.autotune.measure import best_cell
from smkern.autotune.raw import Measurement
from smkern.autotune.rows import RowsCase
from smkern.device import Budget
from smkern.ops.rows.call import problem_of
from smkern.tuning.bucket_table import NEAR
from smkern.tuning.cells import Tuned
from smkern.tuning.rows import ROWS, RowsConfig, RowsKey, RowsProblem
from tests.bench.conftest import FakeCuda

OPS = ("rms_norm", "add_rms_norm", "silu_and_mul", "embedding")
EACH = pytest.mark.parametrize("op", OPS)


@dataclass(frozen=True)
class FakePlace:
    budget: Budget
    stream: Any = None
    neighbour_stream: None = None


def test_cases_are_distinct_cells_near_to_all_sizes() -> None:
    cases = rows.tuned_cases()
    keys = {RowsKey.of(case.problem, Budget(16)) for case in cases}
    assert len(keys) == len(cases) == 5 * (3 * 3 + 4)
    for exponent in range(14):
        assert min(abs(exponent - n.bit_length() + 1) for n in rows.ROWS) <= NEAR


@EACH
def test_a_case_has_the_key_of_its_calls(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TABLE_ROWS", 50)
    case = RowsCase(op, 4, 64)
    small, calls = rows.calls_of(replace(case, rows=4096), "cpu")
    assert small.name == op
    assert len(calls) == case.__class__(op, 4096, 64).num_sets
    problem = problem_of(calls[0], True)
    assert problem is not None
    assert replace(problem, rows=4) == case.problem


@EACH
@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_candidates_begin_with_the_models_choice(profile: Any, op: Any, confined: Any) -> None:
    for case in rows.tuned_cases(rows=(16, 8192)):
        problem, budget = case.problem, Budget(32, confined)
        found = list(rows.FAMILY.wanted(problem, budget, profile))
        assert found[0] == ROWS.choose(problem, budget, profile)
        assert len(set(found)) == len(found)
        assert all(ROWS.is_legal(problem, config, budget, profile) for config in found)
        assert any(not config.pdl for config in found) == (confined == "mask")


class Dispatcher:
    """Launches run the reference on the calls; one configuration is wrong, one fails."""

    def __init__(self, profile: Any, cuda: FakeCuda) -> None:
        self.profile, self.cuda = profile, cuda
        self.calls: list[Any] = []
        self.op: Any = None
        self.wrong: Any = None
        self.failing: Any = None

    def launch_by(self, config: RowsConfig, problem: Any, budget: Budget, capturing: bool) -> Any:
        if config == self.failing:
            raise RuntimeError("no room")

        def launch(stream: int, *given: Any) -> None:
            self.cuda.work_us(10.0 + config.num_warps)
            (call,) = [x for x in self.calls if x[0].data_ptr() == given[0]]
            call.out.copy_(self.op.reference(call))
            if config == self.wrong:
                call.out[0, 0] += 1e-2

        return launch


@EACH
def test_a_cell_is_measured_and_checked_to_the_bit(
    op: Any, profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(rows, "TABLE_ROWS", 50)
    monkeypatch.setattr(RowsCase, "num_sets", 2)
    dispatcher = Dispatcher(profile, cuda)
    case = RowsCase(op, 8, 2048)
    tuner: Any = rows.FAMILY.tuner([case], dispatcher, "cpu")
    dispatcher.op, dispatcher.calls = tuner.op, list(tuner.calls)
    stream: Any = cuda.new_stream()
    stream.cuda_stream = 0
    place: Any = FakePlace(Budget(16, "mask"), stream)
    wanted = rows.FAMILY.wanted(case.problem, place.budget, profile)
    _, dispatcher.wrong, dispatcher.failing, *_ = wanted
    found = tuner.measure(case.problem, place, wanted)
    assert [item.config for item in found] == list(wanted)
    assert found[1].error == "other bits than another candidate"
    assert found[2].error == "RuntimeError: no room"
    for item in found:
        row = item.to_json()
        assert (row["op"], row["width"], row["num_sms"]) == (op, 2048, 16)
        if item.error is None:
            assert item.us == pytest.approx(10.0 + item.config.num_warps, rel=0.05)
    best = best_cell(found)
    assert best is not None
    assert best.us <= 1.015 * min(item.us for item in found if item.error is None)


def test_a_result_that_is_missing_is_wrong(profile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(RowsCase, "num_sets", 1)
    dispatcher = Dispatcher(profile, cuda)
    monkeypatch.setattr(dispatcher, "launch_by", lambda *_: lambda *__: None)
    case = RowsCase("silu_and_mul", 8, 64)
    tuner = rows.FAMILY.tuner([case], dispatcher, "cpu")
    stream: Any = cuda.new_stream()
    stream.cuda_stream = 0
    place: Any = FakePlace(Budget(16, "grid"), stream)
    (found,) = tuner.measure(case.problem, place, {RowsConfig(): 1.0})
    assert found.error is not None
    assert "wrong result" in found.error
    assert best_cell([found]) is None


def test_the_models_choice_is_kept_where_it_is_as_fast() -> None:
    one, two = RowsConfig(4), RowsConfig(8)

    def measured(config: RowsConfig, us: float) -> Measurement[Any, Any]:
        problem = RowsProblem("rms_norm", 8, 64)
        return Measurement(problem, Budget(16), config, us, 0.0, 1.0)

    assert best_cell([measured(one, 10.1), measured(two, 10.0)]) == Tuned(one, 10.1)
    assert best_cell([measured(one, 10.3), measured(two, 10.0)]) == Tuned(two, 10.0)


def test_what_is_tuned_is_what_dispatch_takes(profile: Any, tmp_path: Any) -> None:
    problem, budget = RowsProblem("rms_norm", 16, 4096), Budget(32, "mask")
    names = ("driver", "torch", "triton", "smkern_commit", "date", "command")
    file = ROWS.file(tmp_path / "rows.json")
    tuned = RowsConfig(16, 1, 2, pdl=False)
    cells = {RowsKey.of(problem, budget): Tuned(tuned, 2.0)}
    file.merge(cells, dict.fromkeys(names, "x") | {"gpu": "g"})
    assert ROWS.config(problem, budget, profile, ROWS.table_of(file.load("g"))) == tuned


def test_dry_run_says_what_would_be_measured() -> None:
    command = ["--op", "rows", "--dry-run", "--quick", "--budgets", "16,32"]
    ran = CliRunner().invoke(main.command, command)
    assert ran.exit_code == 0, ran.output
    assert "52 cells" in ran.output


def test_operands_are_random_and_their_own() -> None:
    _, calls = rows.calls_of(RowsCase("add_rms_norm", 1024, 64), "cpu")
    assert len({call.x.data_ptr() for call in calls}) == len(calls) > 1
    assert not torch.equal(calls[0].x, calls[1].x)
