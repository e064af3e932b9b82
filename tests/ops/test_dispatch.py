"""From numbers to a plan: tables first, the model for the rest, and what a capture may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError, WarmupError
from smkern.ops.bounded_cache import model_rows
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from tests.ops.conftest import FakeTable

MASK, SPREAD, GRID = Budget(32, "mask", True), Budget(32, "mask", False), Budget(32, "grid", True)
WHOLE = Budget(132, "grid", True)
OWN = GemmConfig("tma", 128, 128, 64, 4, 4)
CUBLASLT = GemmConfig("cublaslt", 128, 128, 64)


def answers(problem, budget, allow_cublaslt):
    """For rows 65 to 77: cuBLASLt where it may be, else a kernel of ours."""
    if not 65 <= problem.m <= 77:
        return None
    return CUBLASLT if allow_cublaslt and budget.clusters else OWN


@pytest.fixture
def tuned(make_device):
    return make_device(tables=FakeTable(answers))


def problem(m, **changes):
    return GemmProblem(m, 512, 1024, **changes)


@given(st.integers(1, 20000))
def test_model_rows_keeps_the_count_of_tiles(m):
    rounded = model_rows(m)
    assert m <= rounded == model_rows(rounded)
    for block_m in (16, 32, 48, 64, 80, 128, 256) if m <= 512 else (64, 128, 256):
        assert -(-m // block_m) == -(-rounded // block_m)


def test_model_rows_are_few():
    assert len({model_rows(m) for m in range(1, 8193)}) < 200


def test_the_table_counts_before_the_model(tuned):
    assert tuned.dispatcher.select(problem(77), SPREAD).source == "table"
    assert tuned.dispatcher.select(problem(78), SPREAD).source == "model"


@pytest.mark.parametrize(
    ("budget", "backend", "changes", "kernel"),
    [
        (MASK, None, {}, "cublaslt"),
        (WHOLE, None, {}, "cublaslt"),
        (SPREAD, None, {}, "tma"),
        (GRID, None, {}, "tma"),
        (MASK, "own", {}, "tma"),
        (MASK, None, {"batch_invariant": True}, "tma"),
    ],
)
def test_cublas_only_where_it_cannot_leave_the_budget(tuned, budget, backend, changes, kernel):
    assert tuned.dispatcher.select(problem(70, **changes), budget, backend).config.kernel == kernel


def test_model_backend_ignores_the_table(tuned):
    assert tuned.dispatcher.select(problem(70), SPREAD, "model").source == "model"


def test_a_backend_can_be_forced(device):
    for kernel in ("tma", "pointer", "ws"):
        assert device.dispatcher.select(problem(64), SPREAD, kernel).config.kernel == kernel
    assert device.dispatcher.select(problem(64), MASK, "cublaslt").config.kernel == "cublaslt"


@pytest.mark.parametrize(
    ("backend", "budget", "changes"),
    [
        ("tma", MASK, {"aligned": False}),
        ("ws", MASK, {"aligned": False}),
        ("cublaslt", SPREAD, {}),
        ("cublaslt", GRID, {}),
        ("cublaslt", MASK, {"batch_invariant": True}),
        ("cublaslt", MASK, {"epilogue": Epilogue(activation="silu")}),
    ],
)
def test_a_backend_that_cannot_run_says_so(device, backend, budget, changes):
    with pytest.raises(ArgumentError, match=rf"backend='{backend}' cannot run.*backend at None"):
        device.dispatcher.select(problem(64, **changes), budget, backend)


def test_plans_are_kept(device):
    first = device.dispatcher.plan(problem(64), SPREAD)
    assert device.dispatcher.plan(problem(64), SPREAD) is first
    assert device.dispatcher.plan(problem(64), MASK) is not first


def test_a_capture_never_plans_cublas(tuned):
    with pytest.raises(WarmupError, match="not loaded"):
        tuned.dispatcher.plan(problem(70), MASK, capturing=True)
    tuned.dispatcher.plan(problem(70), MASK, "own")
    plan = tuned.dispatcher.plan(problem(70), MASK, capturing=True)
    assert plan.config.kernel == "tma"
    assert tuned.dispatcher.plan(problem(70), MASK).config.kernel == "cublaslt"
    with pytest.raises(WarmupError):
        tuned.dispatcher.plan(problem(71), MASK, "cublaslt", capturing=True)


def test_batch_invariance_takes_one_configuration(device):
    found = {
        (c.kernel, c.block_k, c.split)
        for m in (1, 7, 64, 200, 256)
        for n in (8, 32, 132)
        for c in [
            device.dispatcher.select(
                problem(m, batch_invariant=True), Budget(n, "mask", False)
            ).config
        ]
    }
    assert len(found) == 1


def test_explanations_say_where_a_choice_comes_from(tuned):
    explain = tuned.dispatcher.explain
    assert explain(problem(77), SPREAD).source == "table"
    assert explain(problem(500), SPREAD).source == "model"
    forced = explain(problem(500), SPREAD, "pointer")
    assert forced.source == "forced"
    text = str(forced)
    for part in ("500x512x1024", "32 SMs", "NVIDIA Fake", "kernel pointer", "waves", "us expected"):
        assert part in text
    assert "its own choice" in str(explain(problem(77), MASK))
