"""The tuner of the append: cases, candidates, a cell measured on CPU tensors, the command."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from smkern.autotune import append
from smkern.autotune.attention_cases import MODELS
from smkern.autotune.measure import best_cell
from smkern.bench.ops.append import our_call
from smkern.measure.append import AppendCase, AppendOperands, problem_of_case
from smkern.tuning.append import AppendKey, Budget
from tests.measure.fake_cuda import cuda

__all__ = ["cuda"]


def test_cases_are_distinct_cells():
    cases = append.tuned_cases(MODELS) + append.tuned_cases(MODELS, cache_dtype="fp8")
    keys = {AppendKey.of(case.problem, Budget(16)) for case in cases}
    assert len(keys) == len(cases) == 4 * (4 + 2 + 4)  # two models share their KV heads


@pytest.mark.parametrize("kind", ["plain", "rope", "norm-rope", "fp8"])
@pytest.mark.parametrize("tokens", [8, 512])
def test_a_case_has_the_key_of_its_call(monkeypatch, kind, tokens):
    monkeypatch.setattr(AppendCase, "num_sets", 1)
    case = AppendCase(kind, tokens, 4, 2, 64)
    problem = problem_of_case(AppendOperands(case, device="cpu"))
    assert AppendKey.of(problem, Budget(16)) == AppendKey.of(case.problem, Budget(16))
    assert replace(problem, batch=0) == replace(case.problem, batch=0)


class Dispatcher:
    """Launches run the reference on the operands; one configuration is wrong, one takes longest."""

    def __init__(self, profile, ops, cuda) -> None:
        self.profile, self.ops, self.cuda = profile, ops, cuda
        self.wrong = None

    def launch_by(self, config, problem, budget, capturing):
        good = our_call(self.ops)

        def launch(stream, *values):
            self.cuda.work_us(10.0 + config.num_warps)
            good(0)
            if config == self.wrong:
                k, _ = self.ops.sets[0].cache("HND")
                k[self.ops.places.page[0], self.ops.places.slot[0]] += 1e-2

        return launch


def test_a_cell_is_measured_and_checked_to_the_bit(cuda, profile, monkeypatch):
    monkeypatch.setattr(AppendCase, "num_sets", 1)
    ops = AppendOperands(AppendCase("norm-rope", 8, 4, 2, 64), device="cpu")
    dispatcher = Dispatcher(profile, ops, cuda)
    stream = cuda.new_stream()
    stream.cuda_stream = 0
    place = SimpleNamespace(budget=Budget(16, "grid"), stream=stream)
    problem = problem_of_case(ops)
    wanted = append.FAMILY.wanted(problem, place.budget, profile)
    _, dispatcher.wrong, *_ = wanted
    found = append.AppendTuner(dispatcher, ops).measure(problem, place, wanted)
    assert [item.config for item in found] == list(wanted)
    assert found[1].error == "other bits than another candidate"
    for item in found:
        if item.error is None:
            assert item.us == pytest.approx(10.0 + item.config.num_warps, rel=0.05)
        assert item.to_json()["op"] == "qk_norm_rope_append"
    best = best_cell(found)
    assert best is not None
    fine = [item for item in found if item.error is None]
    assert best.us <= 1.015 * min(item.us for item in fine)
