"""How a cell is measured, on a device that is not there: checks, rounds, operands, workspaces."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from smkern.autotune import measure
from smkern.autotune.measure import CellTuner
from smkern.autotune.shortlist import Candidate
from smkern.bench.operands import Operands
from smkern.bench.timing import Timing
from smkern.errors import ArgumentError
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem

GOOD, SLOW, WRONG, REFUSED = (
    GemmConfig("tma", 64, n, 64, ctas_per_sm=c) for n, c in ((64, 1), (128, 1), (256, 1), (64, 2))
)
SPEED = {GOOD: 10.0, SLOW: 20.0, WRONG: 1.0}


@dataclass
class FakePlan:
    """Computes set 0 with torch, whatever the pointers; notes them."""

    tuner: "FakeDispatcher"
    problem: GemmProblem
    config: GemmConfig
    workspace_bytes: int = 1 << 20

    def bind(self, *strides, static_weights):
        assert static_weights, "a model's weights stay as they are"
        return lambda *addresses: self.launch(*addresses[:5], *strides, *addresses[5:])

    def launch(self, a, w, out, bias, residual, a_stride, w_stride, out_stride, *rest):
        ops = self.tuner.operands
        self.tuner.launches.append((a, w, out, bias, residual, a_stride, w_stride, *rest))
        if out == ops.out(self.problem.m, 0).data_ptr():
            result = self.tuner.cell_tuner._reference(self.problem)
            ops.out(self.problem.m, 0).copy_(result * (2 if self.config == WRONG else 1))


@dataclass
class FakeDispatcher:
    operands: Operands
    launches: list = field(default_factory=list)
    cell_tuner: CellTuner | None = None

    def prepare(self, problem, config, budget):
        if config == REFUSED:
            raise ArgumentError("too many stages: use fewer")
        return FakePlan(self, problem, config)


@pytest.fixture
def timed(monkeypatch):
    """The rounds that were asked for: [(names, rounds, calls a graph)]."""
    asked = []

    def time_interleaved(cases, *, rounds, errors):
        asked.append((sorted(cases), rounds, [case.calls for case in cases.values()]))
        for case in cases.values():
            case.call(case.first_set)
        speeds = {Candidate(config, 0.0).name: us for config, us in SPEED.items()}
        return {name: Timing((speeds[name],) * rounds) for name in cases}

    def try_eagerly(call, stream):
        call(0)

    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    monkeypatch.setattr(measure, "try_eagerly", try_eagerly)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return asked


@pytest.fixture
def tuner():
    operands = Operands(128, 64, 32, device="cpu", num_sets=3)
    dispatcher = FakeDispatcher(operands)
    dispatcher.cell_tuner = CellTuner(dispatcher, operands)
    return dispatcher.cell_tuner


PLACE = SimpleNamespace(
    budget=Budget(16, "mask", False), stream=SimpleNamespace(cuda_stream=77), neighbour_stream=None
)


def candidates(*configs):
    return [Candidate(config, 12.0) for config in configs]


def test_wrong_and_refused_candidates_are_named_and_never_timed(tuner, timed):
    problem = GemmProblem(20, 128, 64)
    found = tuner.measure(problem, PLACE, candidates(WRONG, SLOW, REFUSED, GOOD))
    assert [item.config for item in found][:2] == [GOOD, SLOW]
    assert [item.us for item in found][:2] == [10.0, 20.0]
    errors = {item.config: item.error for item in found[2:]}
    assert "wrong result: |out - torch| / |torch| is 1" in errors[WRONG]
    assert errors[REFUSED] == "ArgumentError: too many stages: use fewer"
    assert len(timed) == 1, "one candidate within 6% of the best needs no finals"


def test_close_candidates_meet_again_in_more_rounds(tuner, timed, monkeypatch):
    monkeypatch.setitem(SPEED, SLOW, 10.3)
    tuner.measure(GemmProblem(20, 128, 64), PLACE, candidates(GOOD, SLOW))
    (_, first, _), (names, final, calls) = timed
    assert len(names) == 2
    assert final > first
    assert calls == [20, 20], "short calls: at most 20 a graph"


def test_launches_rotate_the_sets_on_the_places_stream(tuner, timed):
    problem = GemmProblem(20, 128, 64, epilogue=Epilogue(bias=True, residual=True))
    call = tuner._call(problem, PLACE, GOOD)
    for i in range(4):
        call(i)
    launches = tuner.dispatcher.launches
    assert [item[1] for item in launches] == [tuner.operands.w(i).data_ptr() for i in range(4)]
    bias, residual = tuner._epilogue_operands(problem)
    for item in launches:
        assert item[3:7] == (bias.data_ptr(), residual.data_ptr(), 64, 64)
        assert item[7] == 128, "residual stride"
        assert item[8] == tuner._workspace.data_ptr()
        assert item[9] == 77


def test_reference_has_the_epilogue(tuner):
    problem = GemmProblem(20, 128, 64, epilogue=Epilogue(True, True, "silu"))
    bias, residual = tuner._epilogue_operands(problem)
    value = tuner.operands.a(20, 0).float() @ tuner.operands.w(0).float().t() + bias.float()
    expected = value * torch.sigmoid(value) + residual.float()
    torch.testing.assert_close(tuner._reference(problem).float(), expected, rtol=2e-2, atol=0.1)


def test_a_cell_where_nothing_runs_is_no_cell(tuner, timed):
    found = tuner.measure(GemmProblem(20, 128, 64), PLACE, candidates(REFUSED))
    assert timed == []
    assert measure.best_cell(found) is None
