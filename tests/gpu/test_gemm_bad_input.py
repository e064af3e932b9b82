"""What a GEMM on a GPU refuses: a named error, nothing written, the process alive."""

from __future__ import annotations

import pytest
import torch

import smkern
from smkern.errors import ArgumentError, BudgetError, PartitionError, SmkernError

HALF = torch.bfloat16


@pytest.fixture
def call():
    a, w = (torch.randn(s, 128, device="cuda").to(HALF) for s in (24, 64))
    return {"a": a, "w": w, "out": torch.full((24, 64), 7.0, dtype=HALF, device="cuda")}


def _refused(call, error, message, **changes):
    request = call | changes
    with pytest.raises(error, match=message):
        smkern.gemm(request.pop("a"), request.pop("w"), **request)
    torch.cuda.synchronize()
    assert (call["out"] == 7).all(), "something was written"
    smkern.gemm(call["a"], call["w"])


@pytest.mark.parametrize("num_sms", [0, 10**6])
def test_budgets(call, num_sms):
    _refused(call, BudgetError, rf"num_sms={num_sms}", num_sms=num_sms)


def test_dtypes_and_devices(call):
    """More of them by the same lines on CPU tensors: `tests/ops/test_gemm_checks.py`."""
    a, w = call["a"], call["w"]
    _refused(call, ArgumentError, "float32 on a GPU", a=a.float(), w=w.float(), out=None)
    _refused(call, ArgumentError, "w is on cpu", w=w.cpu())
    _refused(call, ArgumentError, "bias is on cpu", bias=w[0, :64].cpu())


def test_overlaps(call):
    a, w = call["a"], call["w"]
    wide = torch.full((25, 64), 7.0, dtype=HALF, device="cuda")
    _refused(call, ArgumentError, "only be out itself", out=wide[:24], residual=wide[1:])
    assert (wide == 7).all()
    before = a.clone()
    _refused(call, ArgumentError, "overlaps a", out=a[:, :64])
    assert torch.equal(a, before)
    _refused(call, ArgumentError, "overlaps w", out=w[:24, 64:])


def test_workspaces():
    small = torch.zeros(256, dtype=torch.uint8, device="cuda")
    a, w = (torch.randn(s, 16384, device="cuda").to(HALF) for s in (8, 64))
    assert smkern.gemm_workspace_bytes(8, 64, 16384) > 0
    with pytest.raises(ArgumentError, match="workspace has 256 bytes, this launch needs"):
        smkern.gemm(a, w, workspace=small)
    with pytest.raises(ArgumentError, match="workspace is on cpu"):
        smkern.gemm(a, w, workspace=small.cpu())


def test_a_callers_workspace_serves():
    a, w = (torch.randn(s, 16384, device="cuda").to(HALF) for s in (8, 64))
    needed = smkern.gemm_workspace_bytes(8, 64, 16384)
    room = torch.zeros(needed, dtype=torch.uint8, device="cuda")
    want = smkern.gemm(a, w)
    for _ in range(3):
        assert torch.equal(smkern.gemm(a, w, workspace=room), want)


def test_partitions(call):
    ladder = smkern.ladder([16])
    decode = ladder.split(decode=16).decode
    with decode:
        _refused(call, BudgetError, "num_sms=32 is above the 16 SMs", num_sms=32)
    torch.cuda.synchronize()
    ladder.close()
    with pytest.raises(PartitionError), decode:
        smkern.gemm(call["a"], call["w"])
    smkern.gemm(call["a"], call["w"])


def test_a_closed_partitions_stream(call):
    """The stream outlives its partition as a Python object only: refused, not launched on."""
    ladder = smkern.ladder([16])
    stream = ladder.split(decode=16).decode.stream
    torch.cuda.synchronize()
    ladder.close()
    with pytest.raises(SmkernError), torch.cuda.stream(stream):
        smkern.gemm(call["a"], call["w"])
