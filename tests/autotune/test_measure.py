"""How a cell is measured, on a device that is not there: checks, rounds, operands, workspaces."""

from dataclasses import dataclass, field, replace
from math import nan
from types import SimpleNamespace

import pytest
import torch

from smkern.autotune import gemm, measure
from smkern.autotune.gemm import FAMILY, GemmCase, GemmTuner, best_cell, listed
from smkern.autotune.raw import Measurement
from smkern.errors import ArgumentError
from smkern.measure.gemm import GemmOperands
from smkern.tuning import constraints
from smkern.tuning.cells import Tuned
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.table import Cell, CellKey, Table

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
            (result,) = self.tuner.gemm_tuner.expected(self.problem)
            ops.out(self.problem.m, 0).copy_(result * (2 if self.config == WRONG else 1))


@dataclass
class FakeDispatcher:
    operands: GemmOperands
    launches: list = field(default_factory=list)
    gemm_tuner: GemmTuner | None = None

    def prepare(self, problem, config, budget):
        if config == REFUSED:
            raise ArgumentError("too many stages: use fewer")
        return FakePlan(self, problem, config)


@pytest.fixture
def tuner():
    operands = GemmOperands(128, 64, 32, device="cpu", num_sets=3)
    dispatcher = FakeDispatcher(operands)
    dispatcher.gemm_tuner = GemmTuner(dispatcher, operands)
    return dispatcher.gemm_tuner


PLACE = SimpleNamespace(budget=Budget(16, "mask", False), stream=SimpleNamespace(cuda_stream=77))


def candidates(*configs):
    return dict.fromkeys(configs, 12.0)


def test_wrong_and_refused_candidates_are_named_and_never_timed(tuner, timed):
    problem = GemmProblem(20, 128, 64)
    found = tuner.measure(problem, PLACE, candidates(WRONG, GOOD, REFUSED, SLOW))
    assert [item.config for item in found] == [WRONG, GOOD, REFUSED, SLOW]
    assert [item.us for item in found if item.error is None] == [10.0, 20.0]
    errors = {item.config: item.error for item in found}
    assert "wrong result: |x - reference| / |reference| is 1" in errors[WRONG]
    assert errors[REFUSED] == "ArgumentError: too many stages: use fewer"
    assert len(timed) == 1, "one candidate within 6% of the best needs no finals"


def test_close_candidates_meet_again_in_more_rounds(tuner, timed, monkeypatch):
    monkeypatch.setitem(SPEED, SLOW, 10.3)
    tuner.measure(GemmProblem(20, 128, 64), PLACE, candidates(GOOD, SLOW))
    (_, first, _), (names, final, calls) = timed
    assert len(names) == 2
    assert final > first
    assert calls == [25, 25], "graphs of 250 us"


def test_launches_rotate_the_sets_on_the_places_stream(tuner, timed):
    problem = GemmProblem(20, 128, 64, epilogue=Epilogue(bias=True, residual=True))
    call = tuner.call(problem, PLACE, GOOD)
    for i in range(4):
        call(i)
    launches = tuner.dispatcher.launches
    assert [item[1] for item in launches] == [tuner.operands.w(i).data_ptr() for i in range(4)]
    bias, residual = tuner._epilogue_operands(problem)
    for item in launches:
        assert item[3:7] == (bias.data_ptr(), residual.data_ptr(), 64, 64)
        assert item[7] == 128, "residual stride"
        assert item[8] == tuner._workspaces[-1].data_ptr()
        assert item[9] == 77


def test_reference_has_the_epilogue(tuner):
    problem = GemmProblem(20, 128, 64, epilogue=Epilogue(True, True, "silu"))
    bias, residual = tuner._epilogue_operands(problem)
    value = tuner.operands.a(20, 0).float() @ tuner.operands.w(0).float().t() + bias.float()
    expected = value * torch.sigmoid(value) + residual.float()
    torch.testing.assert_close(tuner.expected(problem)[0].float(), expected, rtol=2e-2, atol=0.1)


def test_a_cell_where_nothing_runs_is_no_cell(tuner, timed):
    found = tuner.measure(GemmProblem(20, 128, 64), PLACE, candidates(REFUSED))
    assert timed == []
    assert best_cell(found) is None


def measured(config, us, error=None, predicted_us=12.0):
    problem = GemmProblem(16, 128, 64)
    return Measurement(problem, PLACE.budget, config, us, 0.01, predicted_us, error)


def test_the_library_must_win_clearly():
    ours, library = measured(GOOD, 10.0), measured(constraints.CUBLASLT, 9.95)
    cell = best_cell([ours, library])
    assert (cell.config, cell.us, cell.own) == (GOOD, 10.0, GOOD)
    cell = best_cell([ours, measured(constraints.CUBLASLT, 9.0)])
    assert (cell.config, cell.us, cell.own, cell.own_us) == (constraints.CUBLASLT, 9.0, GOOD, 10.0)
    assert best_cell([library, measured(GOOD, nan, "wrong result")]) is None


def test_a_kernel_of_an_extra_must_win_clearly_and_the_best_of_the_others_stays():
    extra = GemmConfig("cutlass", 80, 128, 64, 4, 8, swap=True)
    cell = best_cell([measured(GOOD, 10.0), measured(extra, 9.95)])
    assert (cell.config, cell.own) == (GOOD, GOOD)
    cell = best_cell([measured(GOOD, 10.0), measured(extra, 8.0)])
    assert (cell.config, cell.us, cell.own, cell.own_us) == (extra, 8.0, GOOD, 10.0)
    assert best_cell([measured(extra, 8.0)]) is None


@pytest.mark.parametrize(("us", "is_likely"), [(8.15, True), (8.17, False)])
def test_of_an_extras_tiles_that_are_as_fast_the_model_chooses(us, is_likely):
    """The smaller one reads more, which a device at its power limit pays for."""
    small, large = (GemmConfig("cutlass", 64 * x, 160, 64, 4, 5) for x in (1, 2))
    found = [measured(GOOD, 10.0), measured(small, 8.0), measured(large, us, predicted_us=11.0)]
    assert best_cell(found).config == (large if is_likely else small)


def test_swiglu_is_also_measured_unfused_and_as_the_plain_gemm_runs(profile, monkeypatch):
    problem = GemmProblem(64, 28672, 4096, epilogue=Epilogue(swiglu=True))
    today = GemmConfig("ws", 64, 64, 64, 4, 7, swap=True)
    key = CellKey.of(replace(problem, epilogue=Epilogue()), PLACE.budget)
    kept = Table({}, {key: Cell(today, 10.0, today, 10.0)})
    monkeypatch.setattr(gemm, "_table_of", lambda info: kept)
    found = list(listed(problem, PLACE.budget, profile))
    assert constraints.UNFUSED in found
    assert constraints.CUBLASLT not in found
    assert found[-1] == today


def test_weights_of_one_shape_share_their_operands():
    cases = [GemmCase(GemmProblem(m, 128, 64)) for m in (8, 32)]
    tuner = FAMILY.tuner(cases, None, "cpu")
    assert (tuner.operands.n, tuner.operands.k, tuner.operands.max_m) == (128, 64, 32)
    assert len({FAMILY.operands(case) for case in cases}) == 1


def test_the_models_choice_is_kept_where_it_is_as_fast():
    def chosen(first_us, other_us):
        return measure.best_cell([measured(GOOD, first_us), measured(SLOW, other_us)])

    assert chosen(10.1, 10.0) == Tuned(GOOD, 10.1)
    assert chosen(10.3, 10.0) == Tuned(SLOW, 10.0)
