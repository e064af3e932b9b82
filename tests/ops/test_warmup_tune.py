"""What a warmup measures and keeps, on a fake device with a clock of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from smkern.errors import ArgumentError
from smkern.ops.gemm import warmup, warmup_tune
from smkern.ops.gemm.warmup import GemmCalls
from smkern.ops.gemm.warmup_tune import MUST_GAIN, ROUNDS, cells_of, places_of, tune
from smkern.ops.swiglu import warmup as swiglu_warmup
from smkern.ops.swiglu.warmup import SwigluCalls
from smkern.ops.warming import Bar, Target
from smkern.ops.warmup import run_all
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from tests.ops.conftest import FakeTable

pytestmark = pytest.mark.slow

MASK, WHOLE, GRID = Budget(32, "mask", True), Budget(132, "mask", True), Budget(24, "grid", True)
STREAM = SimpleNamespace(cuda_stream=7)
PROBLEM = GemmProblem(64, 512, 256)


class Clock:
    """Seconds that pass when something is timed; what each configuration takes, us."""

    def __init__(self, seconds_each: float = 0.01) -> None:
        self.now, self.each, self.timed = 100.0, seconds_each, 0
        self.fastest: GemmConfig | None = None
        self.device = None

    def __call__(self) -> float:
        return self.now

    def time_us(self, stream, launches) -> float:
        for launch in launches:
            launch()
        self.now += self.each
        self.timed += 1
        return 10.0 if self._launched() == self.fastest else 20.0

    def _launched(self) -> GemmConfig:
        """The configuration whose plan was launched since this was asked."""
        (found,) = [plan for plan in self.device.kernels.plans if plan.launches]
        for plan in self.device.kernels.plans:
            plan.launches.clear()
        return found.config


@pytest.fixture
def clock(device, monkeypatch) -> Clock:
    monkeypatch.setattr(warmup_tune, "_MAX_SETS", 2)
    found = Clock()
    found.device = device
    return found


def tuned(device, clock, problems=(PROBLEM,), seconds=60.0):
    cells = cells_of(device.eager, problems, {MASK: STREAM})
    return cells, tune(cells, seconds, time_us=clock.time_us, clock=clock)


def test_the_fastest_is_kept_for_its_step_of_rows_and_explained(device, clock):
    configs = device.dispatcher.close_choices(PROBLEM, MASK)
    assert configs[0] == device.dispatcher.select(PROBLEM, MASK).config
    assert 2 <= len(configs) == len(set(configs)) <= 4
    clock.fastest = configs[-1]
    _, done = tuned(device, clock)
    assert (done, clock.timed) == (1, len(configs) * (ROUNDS + 1))
    for m in (49, 64):
        found = device.dispatcher.explain(replace(PROBLEM, m=m), MASK)
        assert (found.config, found.source) == (configs[-1], "warmup")
        assert found.predicted_us > 0
    for other, budget in ((replace(PROBLEM, m=65), MASK), (PROBLEM, GRID)):
        assert device.dispatcher.explain(other, budget).source == "model"
    assert device.dispatcher.explain(PROBLEM, MASK, "model").source == "model"
    assert not device.dispatcher.close_choices(PROBLEM, MASK), "it is known now"


def test_calls_seen_before_run_by_it_and_load_nothing(device, clock):
    device.budgets[7] = MASK
    a, w = torch.randn(64, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    device.gemm(a, w)
    cells = cells_of(device.eager, [PROBLEM], {MASK: STREAM})
    for config in cells[0].configs:
        device.dispatcher.prepare(PROBLEM, config, MASK)
    for plan in device.kernels.plans:
        plan.launches.clear()
    before = set(device.kernels.loaded)
    clock.fastest = cells[0].configs[1]
    tune(cells, 60.0, time_us=clock.time_us, clock=clock)
    device.gemm(a, w)
    assert device.kernels.plans[-1].config == clock.fastest
    assert device.kernels.loaded == before
    device.is_capturing = True
    device.gemm(a[:63], w)
    assert device.kernels.plans[-1].config == clock.fastest


def test_noise_does_not_move_the_models_choice(device, clock):
    configs = device.dispatcher.close_choices(PROBLEM, MASK)
    clock.time_us = lambda stream, launches: 20.0 / (MUST_GAIN - 0.01)
    cells = cells_of(device.eager, [PROBLEM], {MASK: STREAM})
    tune(cells, 60.0, time_us=clock.time_us, clock=clock)
    assert device.dispatcher.select(PROBLEM, MASK).config == configs[0]


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.5])
def test_the_time_is_kept(device, clock, seconds):
    problems = [replace(PROBLEM, m=m) for m in (16, 32, 64, 128)]
    cells, done = tuned(device, clock, problems, seconds)
    assert clock.now - 100.0 <= seconds + clock.each
    assert done < len(cells)
    sources = [device.dispatcher.select(cell.problem, MASK).source for cell in cells]
    assert sources == ["warmup"] * done + ["model"] * (len(cells) - done)


def test_a_batch_invariant_choice_is_not_measured(device):
    same = replace(PROBLEM, batch_invariant=True)
    assert not cells_of(device.eager, [same], {MASK: STREAM})
    before = device.dispatcher.select(same, MASK)
    (other, *_) = device.dispatcher.close_choices(PROBLEM, MASK)
    with pytest.raises(ArgumentError, match="batch_invariant=False"):
        device.dispatcher.keep_measured(same, MASK, other)
    device.dispatcher.keep_measured(PROBLEM, MASK, other)
    device.eager.records.clear()
    assert device.dispatcher.select(same, MASK) == before


def test_what_a_table_serves_is_not_measured(make_device):
    table = FakeTable(lambda *asked: GemmConfig("tma", 128, 128, 64, 4, 4))
    assert not cells_of(make_device(tables=table).eager, [PROBLEM], {MASK: STREAM})


def test_a_warmup_compiles_what_it_measures(device, clock, monkeypatch):
    monkeypatch.setattr(warmup, "eager_operator", lambda op, index: device.eager)
    monkeypatch.setattr(swiglu_warmup, "eager_operator", lambda op, index: device.eager_swiglu)
    gemm = GemmCalls([(512, 256)], 40, ["bf16"], [Epilogue(residual=True)], [False, True])
    for calls, n in ((gemm, 512), (SwigluCalls([(64, 128)], 40), 128)):
        plain = calls.work(Target(-1, 132, [MASK], [True]))
        work = calls.work(Target(-1, 132, [MASK], [True], {MASK: STREAM}))
        assert not plain.cells
        assert {(cell.problem.m, cell.problem.n) for cell in work.cells} <= {
            (m, n) for m in (1, 16, 32)
        }
        assert work.cells
        assert work.variants >= plain.variants
        for launch in work.launches:
            launch()
        for cell in work.cells:
            for config in cell.configs:
                assert device.dispatcher.is_loaded(cell.problem, config)


def test_without_tune_a_warmup_measures_nothing(device, monkeypatch):
    monkeypatch.setattr(warmup, "eager_operator", lambda op, index: device.eager)
    work = GemmCalls([(512, 256)], 40, ["bf16"], [Epilogue()], [False]).work(
        Target(-1, 132, [MASK], [True])
    )
    report = run_all([replace(work, compile=[])], 1, Bar(False), 0.0)
    assert report.tuned == 0
    assert not device.dispatcher._measured


def test_budgets_are_measured_where_a_stream_has_them():
    partition = SimpleNamespace(num_sms=32, confined="mask", clusters=True, stream="its own")
    resolved = [MASK, Budget(48, "mask", True), GRID, Budget(24, "grid", False), WHOLE]
    found = places_of([partition, 48, 24, 132], resolved, WHOLE, "current")
    assert found == {MASK: "its own", GRID: "current", WHOLE: "current"}
