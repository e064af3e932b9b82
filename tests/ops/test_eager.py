"""The eager path on a fake device: what reaches the kernel, what is checked each time."""

from __future__ import annotations

import pytest
import torch

from smkern.errors import ArgumentError, BudgetError, DeviceError, WarmupError
from smkern.ops.reference import gemm as reference
from smkern.tuning.config import Budget
from smkern.tuning.constraints import COUNTER_BYTES

HALF = torch.bfloat16


def operands(m=5, n=24, k=32):
    return [torch.randn(s).to(HALF) for s in ((m, k), (n, k), (n,), (m, n))]


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_pointers(device, activation, dtype):
    a, w, bias, residual = (x.to(dtype) for x in operands())
    out = torch.full((5, 24), float("nan"), dtype=dtype)
    got = device.gemm(a, w, bias=bias, residual=residual, activation=activation, out=out)
    assert got is out
    assert torch.equal(
        out, reference.gemm(a, w, bias=bias, residual=residual, activation=activation)
    )
    assert device.kernels.plans[-1].launches == [(0, 7)]


def test_views_are_served_without_a_copy(device):
    buffer = torch.randn(64, 128).to(HALF)
    a, w = buffer[:5, 8:40], buffer[:24, 64:96]
    out = torch.empty(5, 64, dtype=HALF)[:, 16:40]
    device.gemm(a, w, out=out)
    assert torch.equal(out, reference.gemm(a, w))
    assert device.kernels.plans[-1].problem.aligned


def test_unaligned_calls_get_a_plan_of_their_own(device):
    a, w, *_ = operands()
    device.gemm(a, w)
    shifted = torch.randn(5 * 32 + 1).to(HALF)[1:].view(5, 32)
    got = device.gemm(shifted, w)
    assert torch.equal(got, reference.gemm(shifted, w))
    assert [plan.problem.aligned for plan in device.kernels.plans] == [True, False]
    assert device.kernels.plans[-1].config.kernel == "pointer"


def test_a_second_call_prepares_nothing(device):
    a, w, *_ = operands()
    for _ in range(3):
        device.gemm(a, w)
        device.gemm(a, w, num_sms=16)
    assert len(device.kernels.plans) == 2
    assert [plan.budget for plan in device.kernels.plans] == [
        Budget(132, "grid", True),
        Budget(16, "grid", True),
    ]


def test_the_promise_of_static_weights_reaches_the_launch(device):
    a, w, *_ = operands()
    for promise in (False, True, False):
        device.gemm(a, w, static_weights=promise)
    assert device.kernels.plans[-1].static_weights == [False, True]


def test_the_streams_partition_is_the_default_and_the_limit(device):
    a, w, *_ = operands()
    device.gemm(a, w)
    device.stream = 8
    device.gemm(a, w)
    assert device.kernels.plans[-1].budget == Budget(32, "mask", False)
    assert device.kernels.plans[-1].launches == [(0, 8)]
    device.gemm(a, w, num_sms=32)
    assert device.kernels.plans[-1].budget == Budget(32, "mask", False)
    device.gemm(a, w, num_sms=24)
    assert device.kernels.plans[-1].budget == Budget(24, "grid", False)
    with pytest.raises(BudgetError, match="above the 32 SMs"):
        device.gemm(a, w, num_sms=48)


def test_a_cached_budget_does_not_let_a_wrong_type_in(device):
    a, w, *_ = operands()
    device.gemm(a, w, num_sms=1)
    for wrong in (True, 1.0):
        with pytest.raises(BudgetError):
            device.gemm(a, w, num_sms=wrong)


def test_nothing_is_written_where_an_argument_is_refused(device):
    a, w, bias, _ = operands()
    out = torch.full((5, 24), 7.0, dtype=HALF)
    for bad in (
        {"bias": bias[:8]},
        {"num_sms": 0},
        {"activation": ["silu"]},
        {"backend": "nothing"},
        {"residual": out[:, :8]},
        {"workspace": torch.zeros(8), "backend": "cublaslt", "activation": "silu"},
    ):
        with pytest.raises((ArgumentError, BudgetError)):
            device.gemm(a, w, out=out, **bad)
    assert (out == 7).all()


def test_overlap_is_checked_in_every_call(device):
    buffer = torch.randn(10, 32).to(HALF)
    a, w = buffer[:5], torch.randn(32, 32).to(HALF)
    device.gemm(a, w, out=buffer[5:])
    with pytest.raises(ArgumentError, match="overlaps a"):
        device.gemm(a, w, out=buffer[4:9])
    device.gemm(a, w, residual=buffer[5:], out=buffer[5:])
    results = torch.empty(6, 32, dtype=HALF)
    with pytest.raises(ArgumentError, match="overlaps residual"):
        device.gemm(a, w, residual=results[1:], out=results[:5])


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 16), (4, 0, 16), (4, 8, 0)])
def test_zero_sizes_launch_nothing(device, m, n, k):
    a, w, bias, residual = operands(m, n, k)
    out = torch.full((m, n), float("nan"), dtype=HALF)
    device.gemm(a, w, bias=bias, residual=residual, activation="silu", out=out)
    want = torch.nn.functional.silu(bias.float()) + residual.float()
    assert torch.equal(out, want.to(HALF))
    assert not device.kernels.plans


def test_a_capture_uses_what_is_loaded_and_refuses_the_rest(device):
    a, w, *_ = operands()
    device.is_capturing, device.capture = True, 1
    with pytest.raises(WarmupError, match=r"gemm 5x24x32 bf16.*smkern.warmup"):
        device.gemm(a, w)
    device.is_capturing = False
    device.gemm(a, w)
    device.is_capturing = True
    device.gemm(a, w)
    device.gemm(a[:4], w)
    assert len(device.kernels.loaded) == 1


def split_call(device, **options):
    """A shape that the model splits: few tiles, many SMs, a long K."""
    a, w = torch.randn(8, 16384).to(HALF), torch.randn(64, 16384).to(HALF)
    got = device.gemm(a, w, **options)
    assert device.kernels.plans[-1].workspace_bytes > COUNTER_BYTES
    return got


def test_split_launches_get_their_streams_workspace(device):
    split_call(device)
    split_call(device)
    device.stream = 8
    split_call(device)
    first, second = device.kernels.plans[-2:]
    assert first.launches[0] == first.launches[1]
    assert first.launches[0][0] != second.launches[0][0] != 0


def test_a_callers_workspace_is_used_and_checked(device):
    split_call(device)
    needed = device.kernels.plans[-1].workspace_bytes
    room = torch.zeros(needed + 512, dtype=torch.uint8)
    room = room[-room.data_ptr() % 256 :]
    split_call(device, workspace=room)
    assert device.kernels.plans[-1].launches[-1][0] == room.data_ptr()
    with pytest.raises(ArgumentError, match=r"has 100 bytes, this launch needs \d+"):
        split_call(device, workspace=room[:100])
    with pytest.raises(ArgumentError, match="multiple of 256"):
        split_call(device, workspace=room[1:])
    with pytest.raises(ArgumentError, match="workspace is int"):
        split_call(device, workspace=1)


def test_a_failed_launch_gets_fresh_counters(device):
    split_call(device)
    plan = device.kernels.plans[-1]
    before = device.workspaces.pointer(7, 1)

    def fail(*_):
        raise DeviceError("launch failed")

    for key, record in device.eager.records.items():
        device.eager.records[key] = record._replace(launch=fail)
    held = device.workspaces._of_streams[7].tensor
    with pytest.raises(DeviceError):
        split_call(device)
    assert device.workspaces.pointer(7, plan.workspace_bytes) != before
    assert held.data_ptr() == before


def test_old_gpus_are_refused(make_device):
    a, w, *_ = operands()
    with pytest.raises(DeviceError, match=r"7\.5"):
        make_device(capability=(7, 5)).gemm(a, w)


def test_sm80_gets_the_pointer_kernel(make_device):
    a, w, *_ = operands()
    device = make_device(capability=(8, 0))
    device.gemm(a, w)
    assert device.kernels.plans[-1].config.kernel == "pointer"
