"""The tuners of declared operators: cases, candidates, cells on CPU tensors, the command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from smkern.autotune import moe, sample
from smkern.autotune.moe import Experts, MoeCase
from smkern.autotune.operators import OPERATORS, Options
from smkern.autotune.sample import SampleCase
from smkern.device import Budget
from smkern.ops.operator_warmup import aligned
from smkern.tuning.bucket_table import NEAR
from smkern.tuning.sample import SampleProblem
from tests.measure.fake_cuda import FakeCuda

SMALL = Experts(64, 24, 8, 2)


@dataclass(frozen=True)
class Tuned:
    """A family's module, how it measures, and one of its cases."""

    module: Any
    family: Any
    case: Any


TUNED = {"sample": Tuned(sample, sample.FAMILY, SampleCase(8, 500))}
TUNED |= {op: Tuned(moe, moe.MOE, MoeCase(op, SMALL, 300)) for op in moe.MOE_OPS}
TUNED |= {op: Tuned(moe, moe.GROUPED, MoeCase(op, SMALL, 300)) for op in moe.GROUPED_OPS}
EACH = pytest.mark.parametrize("tuned", TUNED.values(), ids=TUNED)


@pytest.fixture(autouse=True)
def _small_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sample, moe):
        monkeypatch.setattr(module, "sets_for", lambda *_, **__: 2)


def test_sizes_are_near_to_all() -> None:
    for exponent in range(14):
        assert min(abs(exponent - n.bit_length() + 1) for n in moe.TOKENS) <= NEAR


def test_alike_vocabularies_share_their_cells() -> None:
    key_of = sample.FAMILY.tuned.key_of
    near = {key_of(SampleProblem(1, vocab), Budget(16)) for vocab in (151_936, 152_064)}
    assert len(near) == 1


def test_a_larger_model_has_cases_of_its_own() -> None:
    case, key_of = MoeCase("gate_up", SMALL, 8), moe.GROUPED.tuned.key_of
    other = replace(case, model=replace(SMALL, num_experts=16))
    assert key_of(case.problem, Budget(16)) != key_of(other.problem, Budget(16))


@EACH
def test_a_case_is_its_calls(tuned: Tuned) -> None:
    op, calls = tuned.module.calls_of(tuned.case, "cpu")
    key_of, budget = tuned.family.tuned.key_of, Budget(16)
    assert len({call[0].data_ptr() for call in calls}) == len(calls) == 2
    assert not calls[0][0].equal(calls[1][0])
    for call in calls:
        problem = op.problem(call, aligned(op, call))
        assert key_of(problem, budget) == key_of(tuned.case.problem, budget)


def test_some_rows_are_greedy() -> None:
    _, (call, *_) = sample.calls_of(SampleCase(16, 4096), "cpu")
    assert call.temperature.tolist().count(0.0) == 2


@pytest.mark.parametrize("confined", ["mask", "grid"])
@pytest.mark.parametrize("name", ["append", "sample", "moe", "grouped_gemm"])
def test_candidates_begin_with_the_models_choice(profile: Any, name: str, confined: Any) -> None:
    work = OPERATORS[name](Options())
    family, budget = work.family.tuned, Budget(32, confined)
    for problem in (case.problem for case in work.cases):
        found = list(work.family.wanted(problem, budget, profile))
        assert found[0] == family.choose(problem, budget, profile)
        assert len(set(found)) == len(found)
        assert all(family.is_legal(problem, config, budget, profile) for config in found)
        if "pdl" in family.overlap:
            assert any(not config.pdl for config in found) == (confined == "mask")


class Dispatcher:
    """Launches bring what the reference made of the calls; one configuration is a little off, one
    fails."""

    def __init__(self, profile: Any, cuda: FakeCuda) -> None:
        self.profile, self.cuda = profile, cuda
        self.tuner: Any = None
        self.off: Any = None
        self.failing: Any = None
        self._made: dict[int, Any] = {}

    def launch_by(self, config: Any, problem: Any, budget: Budget, capturing: bool) -> Any:
        if config == self.failing:
            raise RuntimeError("no room")

        def launch(stream: int, *given: Any) -> None:
            self.cuda.work_us(10.0 + config.num_warps)
            (call,) = [x for x in self.tuner.calls if x[0].data_ptr() == given[0]]
            if given[0] not in self._made or self.tuner.op.changed:
                self._made[given[0]] = self.tuner.op.reference(call)
            made, results = self._made[given[0]], self.tuner.op.results_of(call)
            for x, y in zip(results, made if isinstance(made, tuple) else (made,), strict=True):
                x.copy_(y)
            if config == self.off:
                first = results[0].view(-1)[:1]
                first.copy_(1.05 * first if first.is_floating_point() else first + 1)

        return launch


def tuner_of(tuned: Tuned, dispatcher: Any, cuda: FakeCuda) -> tuple[Any, Any]:
    """A tuner of the case, and a place."""
    tuner = tuned.family.tuner([tuned.case], dispatcher, "cpu")
    dispatcher.tuner, stream = tuner, cuda.new_stream()
    stream.cuda_stream = 0
    return tuner, SimpleNamespace(budget=Budget(16, "mask"), stream=stream)


@EACH
def test_a_cell_is_measured_and_checked(tuned, profile, monkeypatch) -> None:
    """Grouped products may sum in another order; the rest must agree to the bit."""
    cuda = FakeCuda().install(monkeypatch)
    dispatcher, problem = Dispatcher(profile, cuda), tuned.case.problem
    tuner, place = tuner_of(tuned, dispatcher, cuda)
    wanted = tuned.family.wanted(problem, place.budget, profile)
    _, dispatcher.off, dispatcher.failing, *_ = wanted
    found = tuner.measure(problem, place, wanted)
    assert [item.config for item in found] == list(wanted)
    free = tuned.family is moe.GROUPED
    assert found[1].error == (None if free else "other bits than another candidate")
    assert found[2].error == "RuntimeError: no room"
    fine = [item for item in found if item.error is None]
    for item in fine:
        assert item.us == pytest.approx(10.0 + item.config.num_warps, rel=0.05)
    row = found[0].to_json()
    assert (row["op"], row["num_sms"]) == (tuner.op.name, 16)
    best = tuned.family.best(found)
    assert best.us <= 1.02 * min(item.us for item in fine)


@EACH
def test_a_result_that_is_missing_is_wrong(tuned, profile, monkeypatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    dispatcher: Any = SimpleNamespace(launch_by=lambda *_: lambda *__: None)
    tuner, place = tuner_of(tuned, dispatcher, cuda)
    config = tuned.family.tuned.choose(tuned.case.problem, place.budget, profile)
    (found,) = tuner.measure(tuned.case.problem, place, {config: 1.0})
    assert "wrong result" in found.error
    assert tuned.family.best([found]) is None
