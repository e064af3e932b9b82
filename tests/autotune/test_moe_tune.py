"""The tuner of the experts' operators: cases, candidates, a cell on CPU tensors, the command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from click.testing import CliRunner

from smkern.autotune import main, moe, moe_cases
from smkern.autotune.moe_cases import Experts, MoeCase
from smkern.device import Budget
from smkern.measure.attention import QUICK_BUDGETS
from smkern.ops.operator_warmup import aligned
from tests.bench.conftest import FakeCuda

SMALL = Experts(64, 24, 8, 2)
FAMILIES = {"moe": moe.MOE, "grouped_gemm": moe.GROUPED}
OPS = {"moe": moe_cases.MOE_OPS, "grouped_gemm": moe_cases.GROUPED_OPS}
EACH = pytest.mark.parametrize(
    ("family", "op"), [(FAMILIES[name], op) for name, ops in OPS.items() for op in ops]
)


@dataclass(frozen=True)
class FakePlace:
    budget: Budget
    stream: Any = None
    neighbour_stream: None = None


@pytest.mark.parametrize("name", FAMILIES)
def test_cases_are_distinct_cells(name: str) -> None:
    cases = moe_cases.cases_of(OPS[name], moe_cases.TOKENS)
    keys = {FAMILIES[name].family.key_of(case.problem, Budget(16)) for case in cases}
    assert len(keys) == len(cases) == len(OPS[name]) * len(moe_cases.TOKENS)


@EACH
def test_a_case_has_the_key_of_its_calls(
    family: Any, op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_cases, "MAX_SETS", 2)
    case = MoeCase(op, SMALL, 40)
    small, calls = moe_cases.calls_of(case, "cpu")
    assert len(calls) == case.num_sets == 2
    problem = small.problem(calls[0], aligned(small, calls[0]))
    budget = Budget(16)
    assert family.family.key_of(problem, budget) == family.family.key_of(case.problem, budget)
    assert all(small.problem(call, True) == problem for call in calls)


@EACH
@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_candidates_begin_with_the_models_choice(
    profile: Any, family: Any, op: Any, confined: Any
) -> None:
    for tokens in (1, 64, 8192):
        problem, budget = MoeCase(op, moe_cases.MODELS[0], tokens).problem, Budget(32, confined)
        found = list(family.wanted(problem, budget, profile))
        assert found[0] == family.family.config(problem, budget, profile)
        assert len(set(found)) == len(found)
        assert any(not config.pdl for config in found) == (confined == "mask")


class Dispatcher:
    """Launches run the reference on the calls; one configuration is a little off, one fails."""

    def __init__(self, profile: Any, cuda: FakeCuda) -> None:
        self.profile, self.cuda = profile, cuda
        self.calls: list[Any] = []
        self.op: Any = None
        self.off: Any = None
        self.failing: Any = None

    def launch_by(self, config: Any, problem: Any, budget: Budget, capturing: bool) -> Any:
        if config == self.failing:
            raise RuntimeError("no room")

        def launch(stream: int, *given: Any) -> None:
            self.cuda.work_us(10.0 + config.num_warps)
            (call,) = [x for x in self.calls if x[0].data_ptr() == given[0]]
            made = self.op.reference(call)
            results = self.op.results_of(call)
            for x, y in zip(results, made if isinstance(made, tuple) else (made,), strict=True):
                x.copy_(y)
            if config == self.off:
                results[0][0] *= 1.05

        return launch


@EACH
def test_a_cell_is_measured_and_checked(
    family: Any, op: Any, profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped products may sum in another order; the rest must agree to the bit."""
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(moe_cases, "MAX_SETS", 2)
    dispatcher = Dispatcher(profile, cuda)
    case = MoeCase(op, SMALL, 300)
    tuner = family.tuner([case], dispatcher, "cpu")
    dispatcher.op, dispatcher.calls = tuner.op, list(tuner.calls)
    stream: Any = cuda.new_stream()
    stream.cuda_stream = 0
    place: Any = FakePlace(Budget(16, "mask"), stream)
    wanted = family.wanted(case.problem, place.budget, profile)
    _, dispatcher.off, dispatcher.failing, *_ = wanted
    found = tuner.measure(case.problem, place, wanted)
    assert [item.config for item in found] == list(wanted)
    free = family is moe.GROUPED
    assert found[1].error == (None if free else "other bits than another candidate")
    assert found[2].error == "RuntimeError: no room"
    row = found[0].to_json()
    assert (row["op"], row["num_sms"]) == (tuner.op.name, 16)
    best = family.best(found)
    assert best is not None
    assert best.us <= 1.02 * min(item.us for item in found if item.error is None)


@pytest.mark.parametrize("op", FAMILIES)
def test_the_command_says_what_it_would_measure(op: str) -> None:
    given = ["--op", op, "--quick", "--dry-run"]
    result = CliRunner().invoke(main.command, given, catch_exceptions=False)
    cells = len(OPS[op]) * len(moe_cases.QUICK_TOKENS) * len(QUICK_BUDGETS)
    assert f"{cells} cells" in result.output


def test_a_larger_model_has_cases_of_its_own() -> None:
    case = MoeCase("gate_up", SMALL, 8)
    other = replace(case, model=replace(SMALL, num_experts=16))
    budget = Budget(16)
    assert moe.GROUPED.family.key_of(case.problem, budget) != moe.GROUPED.family.key_of(
        other.problem, budget
    )
