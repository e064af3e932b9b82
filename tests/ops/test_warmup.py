"""Warmup reaches every choice that dispatch can make, on a fake device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from smkern.errors import ArgumentError, BudgetError, DeviceError
from smkern.kernels.gemm_variants import variant_of
from smkern.ops import warmup as public_warmup
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.ops.gemm.warmup import GemmCalls, choices, epilogue_from, launch_once, rows_to_visit
from smkern.ops.warming import Bar, as_budgets
from smkern.profile import load_profile
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.constraints import CUBLASLT
from smkern.tuning.select import GEMM_FAMILY
from tests.ops.conftest import FakePlan, FakeTable

pytestmark = pytest.mark.slow


def tuned(problem, budget, allow_cublaslt):
    """A cell at 77 rows that serves 70 to 77."""
    if not 70 <= problem.m <= 77:
        return None
    return GemmConfig("cublaslt" if allow_cublaslt else "tma", 128, 128, 64)


TABLE = FakeTable(tuned, GemmProblem(77, 512, 4096))


def visited(device, budgets):
    calls = GemmCalls([(512, 4096)], 300, ["bf16"], [Epilogue()], [False])
    return list(choices(device.dispatcher, calls, budgets, [True]))


def test_every_m_and_budget_finds_its_variant_among_the_visited(make_device):
    device = make_device(tables=TABLE)
    budgets = [Budget(n, c, True) for n in (8, 60, 132) for c in ("mask", "grid")]
    variant = device.kernels._variant
    reached = {variant(p, c) for p, c, _ in visited(device, budgets)}
    for budget in budgets:
        for m in range(1, 301):
            problem = GemmProblem(m, 512, 4096)
            for backend in (None, "own"):
                config = device.dispatcher.select(problem, budget, backend).config
                assert variant(problem, config) in reached


def test_rows_have_the_tuned_ones(make_device):
    device = make_device(tables=TABLE)
    rows = rows_to_visit(device.dispatcher, 512, 4096, 300)
    assert 77 in rows
    assert rows[:6] == [1, 2, 4, 8, 16, 32]
    assert rows[-1] == 304
    assert 77 not in rows_to_visit(device.dispatcher, 512, 512, 300)


def test_cublas_choices_bring_ours_along(make_device):
    device = make_device(tables=TABLE)
    kernels = {c.kernel for p, c, _ in visited(device, [Budget(32, "mask", True)]) if p.m == 77}
    assert kernels == {"cublaslt", "tma"}


def test_budgets_from_counts_partitions_and_budgets():
    partition = SimpleNamespace(num_sms=32, confined="mask", clusters=False)
    assert as_budgets([partition], 132) == [Budget(32, "mask", False)]
    assert as_budgets([Budget(5, "grid", True)] * 2, 132) == [Budget(5, "grid", True)]
    assert as_budgets([132], 132) == [Budget(132, "mask", True)]
    assert len(as_budgets([16], 132)) == 4
    assert {b.num_sms for b in as_budgets(None, 132)} == {*range(8, 132, 8), 132}
    with pytest.raises(BudgetError, match="133"):
        as_budgets([133], 132)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("none", Epilogue()),
        ("bias", Epilogue(True)),
        ("bias+residual+silu", Epilogue(True, True, "silu")),
        (Epilogue(residual=True), Epilogue(residual=True)),
    ],
)
def test_epilogues_by_key(text, want):
    assert epilogue_from(text) == want
    assert epilogue_from(want.key) == want


@pytest.mark.parametrize("text", ["relu", "bias+", "silu+gelu"])
def test_unknown_epilogues(text):
    with pytest.raises(ArgumentError, match="join 'bias'"):
        epilogue_from(text)


@pytest.mark.parametrize("key", ["none", "bias+residual+silu"])
def test_one_launch_of_a_choice(device, key):
    problem = GemmProblem(3, 24, 40, epilogue=epilogue_from(key))
    budget = Budget(132, "grid", True)
    config = device.dispatcher.select(problem, budget).config
    launch_once(device.eager, problem, config, budget)
    assert len(device.kernels.plans[-1].launches) == 1
    assert device.dispatcher.is_loaded(problem, config)


@pytest.mark.parametrize(
    ("key", "config", "count"),
    [
        ("none", CUBLASLT, 1),
        ("residual", CUBLASLT, 2),
        ("residual", GemmConfig("tma", 128, 128, 64), 1),
    ],
)
def test_cublas_is_launched_in_place_and_not(make_device, monkeypatch, key, config, count):
    """It has other kernels where the residual is `out`, as a decoder calls it."""
    device = make_device(tables=TABLE)
    launched = []
    monkeypatch.setattr(
        FakePlan, "launch", lambda self, a, w, out, bias, res, *rest: launched.append((out, res))
    )
    problem = GemmProblem(65, 24, 40, epilogue=epilogue_from(key))
    launch_once(device.eager, problem, config, Budget(132, "mask", True))
    assert len(set(launched)) == len(launched) == count
    assert [out == res for out, res in launched] == [False, True][:count]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so():
    with pytest.raises(DeviceError, match="no GPU is visible"):
        public_warmup(shapes=[(512, 512)])


@pytest.mark.parametrize(
    "request_", [{"shapes": [(0, 4)]}, {"shapes": [(4,)]}, {"shapes": [], "max_m": 0},
                 {"shapes": [], "ops": ["conv"]}, {"shapes": [], "epilogues": ["x"]},
                 {"shapes": [], "tune": True, "tune_s": -1}]
)  # fmt: skip
def test_bad_requests(request_):
    with pytest.raises(ArgumentError):
        public_warmup(**request_)


@pytest.mark.parametrize("shown", [True, False])
def test_the_bar(shown):
    with Bar(shown) as bar:
        bar.step("compiling", 3)(2)


@pytest.mark.parametrize("num_sms", [34, 60, 66, 100])
def test_every_row_count_runs_what_the_warmup_visited(num_sms):
    """By the shipped tables, whose cells serve down to half of their rows, and between them."""
    dispatcher = offline_dispatcher(load_profile("h200"), GEMM_FAMILY.load(load_profile("h200")))
    budget = Budget(num_sms, "mask", False)
    calls = GemmCalls([(6144, 4096), (4096, 12288)], 1100, ["bf16"], [Epilogue()], [False])
    visited = {
        (problem.n, variant_of(problem, config, 90))
        for problem, config, _ in choices(dispatcher, calls, [budget], [True])
        if config.kernel != "cublaslt"
    }
    for n, k in calls.shapes:
        for m in range(1, 1101):
            problem = GemmProblem(m, n, k)
            config = dispatcher.select(problem, budget).config
            assert (n, variant_of(problem, config, 90)) in visited, f"{m} rows of {n}x{k}"


def test_every_row_count_of_cublaslt_is_launched():
    """It picks a kernel by the very number of rows, and one that is new waits for the device."""
    dispatcher = offline_dispatcher(load_profile("h200"), GEMM_FAMILY.load(load_profile("h200")))
    whole = Budget(132, "mask", True)
    calls = GemmCalls([(4096, 12288)], 1100, ["bf16"], [Epilogue(residual=True)], [False])
    launched = [
        problem.m
        for problem, config, _ in choices(dispatcher, calls, [whole], [True])
        if config.kernel == "cublaslt"
    ]
    served = [
        m for m in (*range(1, 513), *range(576, 1101, 64))
        if dispatcher.select(GemmProblem(m, 4096, 12288, "bf16", calls.epilogues[0]), whole)
        .config.kernel == "cublaslt"
    ]  # fmt: skip
    assert {97, 257} <= {*served} <= {*launched}
    assert len(launched) == len({*launched})


def test_a_partition_needs_no_more_rows(make_device):
    """cuBLASLt cannot keep to its SMs."""
    device = make_device(tables=TABLE)
    rows = {p.m for p, _, _ in visited(device, [Budget(60, "mask", False)])}
    assert rows == {*rows_to_visit(device.dispatcher, 512, 4096, 300)}


def test_swiglu_unfused_brings_its_product_at_every_row_count():
    dispatcher = offline_dispatcher(load_profile("h200"), GEMM_FAMILY.load(load_profile("h200")))
    whole, gated = Budget(132, "mask", True), Epilogue(swiglu=True)
    calls = GemmCalls([(24576, 4096)], 512, ["bf16"], [gated], [False])
    found = list(choices(dispatcher, calls, [whole], [True]))
    launched = {(p.m, p.epilogue, c.kernel) for p, c, _ in found}
    unfused = [
        m for m in range(1, 513)
        if dispatcher.select(GemmProblem(m, 24576, 4096, "bf16", gated), whole)
        .config.kernel == "unfused"
    ]  # fmt: skip
    assert 146 in unfused  # beside a tuned M of 160 or so
    for m in unfused:
        plain = GemmProblem(m, 24576, 4096)
        assert (m, gated, "unfused") in launched
        assert (m, Epilogue(), dispatcher.select(plain, whole).config.kernel) in launched
    products = {m for m, epilogue, _ in launched if epilogue == Epilogue()}
    assert products == {*unfused}  # and at no other: of all weights these are the largest
