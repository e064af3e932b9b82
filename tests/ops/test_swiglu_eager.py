"""The eager path of `gemm_swiglu` on a fake device: fused, unfused, in captures, in a warmup."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from smkern.errors import ArgumentError, BudgetError, WarmupError
from smkern.ops.gemm.warmup import GemmCalls, choices
from smkern.ops.reference.swiglu import gemm_swiglu as reference
from smkern.ops.rows.call import SiluAndMul, problem_of
from smkern.ops.swiglu import SwigluCalls, warmup
from smkern.ops.swiglu.unfused import RowsSilu
from smkern.ops.warming import Target
from smkern.tuning import constraints
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.constraints import COUNTER_BYTES
from tests.ops.conftest import FakeTable

HALF = torch.bfloat16
OWN = GemmConfig("ws", 16, 128, 64, 4, 6, swap=True)


def unfused_table():
    """Every SwiGLU is tuned to run unfused."""

    def found(problem, budget, allow_cublaslt):
        return constraints.UNFUSED if problem.epilogue.swiglu and allow_cublaslt else OWN

    return FakeTable(found)


def operands(m=5, inner=24, k=32):
    return torch.randn(m, k).to(HALF), torch.randn(2 * inner, k).to(HALF)


def test_values_and_pointers(device):
    a, w = operands()
    out = torch.full((5, 24), float("nan"), dtype=HALF)
    assert device.gemm_swiglu(a, w, out=out) is out
    assert torch.equal(out, reference(a, w))
    plan = device.kernels.plans[-1]
    assert plan.problem.n == 48
    assert plan.problem.epilogue.swiglu
    assert plan.launches == [(0, 7)]
    assert torch.equal(device.gemm_swiglu(a, w), out)
    assert len(device.kernels.plans) == 1


def test_views_and_alignment(device):
    buffer = torch.randn(64, 128).to(HALF)
    a, w = buffer[:5, 8:40], buffer[:48, 64:96]
    out = torch.empty(5, 64, dtype=HALF)[:, 16:40]
    device.gemm_swiglu(a, w, out=out)
    assert torch.equal(out, reference(a, w))
    assert device.kernels.plans[-1].problem.aligned
    for inner in (20, 12):  # rows of out that are no whole 16 bytes
        a, w = operands(inner=inner)
        device.gemm_swiglu(a, w)
        assert not device.kernels.plans[-1].problem.aligned
        assert device.kernels.plans[-1].config.kernel == "pointer"


def test_nothing_is_written_where_an_argument_is_refused(device):
    a, w = operands()
    out = torch.full((5, 24), 7.0, dtype=HALF)
    for bad in (
        {"num_sms": 0},
        {"backend": "nothing"},
        {"backend": "cublaslt"},
        {"backend": "unfused", "batch_invariant": True},
    ):
        with pytest.raises((ArgumentError, BudgetError)):
            device.gemm_swiglu(a, w, out=out, **bad)
    assert (out == 7).all()
    with pytest.raises(ArgumentError, match="backend='unfused' cannot run"):
        device.gemm(a, w, backend="unfused")


def test_overlap_is_checked_in_every_call(device):
    buffer = torch.randn(12, 32).to(HALF)
    a, w = buffer[:5], torch.randn(64, 32).to(HALF)
    device.gemm_swiglu(a, w, out=buffer[5:10])
    with pytest.raises(ArgumentError, match="overlaps a"):
        device.gemm_swiglu(a, w, out=buffer[4:9])
    with pytest.raises(ArgumentError, match="overlaps w_gate_up"):
        device.gemm_swiglu(a, w, out=w[:5])


@pytest.mark.parametrize(("m", "inner", "k"), [(0, 8, 16), (4, 0, 16), (4, 8, 0)])
def test_zero_sizes_launch_nothing(device, m, inner, k):
    a, w = operands(m, inner, k)
    out = torch.full((m, inner), float("nan"), dtype=HALF)
    device.gemm_swiglu(a, w, out=out)
    assert not out.any()
    assert not device.kernels.plans


def rounded_twice(a, w):
    gate, up = (a.float() @ w.float().T).to(HALF).float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(HALF)


def test_unfused_is_two_launches_by_way_of_the_workspace(device):
    a, w = operands()
    out = torch.empty(5, 40, dtype=HALF)[:, 8:32]
    device.gemm_swiglu(a, w, out=out, backend="unfused", num_sms=16)
    assert torch.equal(out, rounded_twice(a, w))
    gemm = device.kernels.plans[-1]
    assert not gemm.problem.epilogue.swiglu
    assert gemm.budget == Budget(16, "grid", True)
    assert device.silu.launches == [Budget(16, "grid", True)]
    (record,) = device.eager_swiglu.records.values()
    assert record.workspace_bytes >= COUNTER_BYTES + 5 * 48 * 2
    counters = device.workspaces._of_streams[7].tensor[:COUNTER_BYTES]
    assert not counters.any(), "gate and up lie behind the counters that others rely on"


def test_a_tuned_unfused_cell_runs_unfused(make_device):
    device = make_device(tables=unfused_table())
    a, w = operands()
    assert torch.equal(device.gemm_swiglu(a, w), rounded_twice(a, w))
    assert torch.equal(device.gemm_swiglu(a, w, backend="own"), reference(a, w))


def test_a_capture_takes_what_is_loaded(make_device):
    device = make_device(tables=unfused_table())
    a, w = operands()
    device.is_capturing, device.capture = True, 1
    with pytest.raises(WarmupError):
        device.gemm_swiglu(a, w)
    device.is_capturing = False
    device.gemm_swiglu(a, w, backend="own")
    device.is_capturing = True
    assert torch.equal(device.gemm_swiglu(a, w), reference(a, w)), "gives way to the fused kernel"
    device.is_capturing = False
    device.gemm_swiglu(a, w)
    device.is_capturing = True
    assert torch.equal(device.gemm_swiglu(a[:4], w), rounded_twice(a[:4], w))


def test_a_warmup_covers_all_that_dispatch_can_choose(make_device, monkeypatch):
    device = make_device(tables=unfused_table())
    eager = SimpleNamespace(dispatcher=device.eager_swiglu.dispatcher)
    monkeypatch.setattr(warmup, "eager_operator", lambda op, index: eager)
    target = Target(0, 132, [Budget(32, "mask", True)], [True])
    calls = SwigluCalls(shapes=[(24, 32)], max_m=16)
    kinds = set()
    products = GemmCalls([(48, 32)], 16, ["bf16"], [warmup.EPILOGUE], [False])
    for problem, config, _ in choices(eager.dispatcher, products, target.budgets, [True]):
        kinds.add((problem.epilogue.key, config.kernel))
    assert kinds == {("swiglu", "unfused"), ("swiglu", "ws"), ("none", "ws")}
    work = calls.work(target)
    assert work.variants >= 2
    assert len(work.launches) >= work.variants


def test_silu_and_mul_is_launched_by_rows_of_sixteen_bytes():
    """As `smkern.silu_and_mul` would be: its addresses, steps in eights, rows."""
    budget, wanted, calls = Budget(32, "mask", True), [], []
    loaded = SimpleNamespace(is_loaded=lambda problem: problem.width == 24)

    def launch(problem, given):
        wanted.append((problem, given))
        return lambda *arguments: calls.append(arguments)

    silu = RowsSilu(SimpleNamespace(kernels=lambda: loaded, launch=launch))
    problem = GemmProblem(5, 48, 32, "fp16", Epilogue(swiglu=True))
    assert silu.is_loaded(problem)
    silu.bind(problem, budget, 40)(1000, 2000, 7)
    call = SiluAndMul(torch.empty(5, 48).half(), torch.empty(5, 40).half()[:, :24])
    assert wanted == [(problem_of(call, True), budget)]
    assert calls == [(7, 1000, 2000, 6, 5, 5)]
