"""`smkern::gemm` in torch.library on a GPU: opcheck, torch.compile, multi-stream use."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import smkern
from tests.gpu.confinement import check_streams

HALF = torch.bfloat16


def _inputs():
    shapes = (24, 128), (64, 128), (64,), (24, 64)
    made = [torch.randn(shape, device="cuda").to(HALF) for shape in shapes]
    smkern.gemm(*made[:2])
    return made


@pytest.mark.parametrize(
    "options", [{}, {"num_sms": 16, "activation": "silu"}, {"batch_invariant": True}]
)
def test_opcheck(options):
    a, w, bias, residual = _inputs()
    kwargs = {**options, "bias": bias, "residual": residual}
    opcheck(torch.ops.smkern.gemm.default, (a, w), kwargs)
    out = torch.empty(24, 64, dtype=HALF, device="cuda")
    opcheck(torch.ops.smkern.gemm_out.default, (a, w, out), kwargs)


def test_the_operator_and_the_eager_call_give_the_same_bits():
    a, w, bias, residual = _inputs()
    options = {"bias": bias, "residual": residual, "activation": "gelu", "num_sms": 20}
    want = smkern.gemm(a, w, **options)
    assert torch.equal(torch.ops.smkern.gemm(a, w, **options), want)
    out = torch.empty_like(want)
    assert torch.ops.smkern.gemm_out(a, w, out, **options) is None
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend):
    a, w, bias, residual = _inputs()

    @torch.compile(backend=backend, fullgraph=True)
    def layer(a, w, bias, residual):
        x = smkern.gemm(a * 2, w, bias=bias, activation="silu", num_sms=32)
        out = residual.clone()
        smkern.gemm(a, w, residual=out, out=out)
        return x + out

    want = smkern.gemm(a * 2, w, bias=bias, activation="silu", num_sms=32)
    want = want + smkern.gemm(a, w, residual=residual)
    torch.testing.assert_close(layer(a, w, bias, residual), want, rtol=1e-2, atol=1e-2)


def test_a_compiled_budget_is_resolved_when_it_runs():
    """Compiled outside, run in a partition: the partition's SMs count."""
    a, w, *_ = _inputs()
    layer = torch.compile(lambda a, w: smkern.gemm(a, w), backend="aot_eager", fullgraph=True)
    want = layer(a, w)
    with smkern.ladder([16]) as ladder:
        torch.cuda.synchronize()
        with ladder.split(decode=16).decode:
            got = layer(a, w)
            with pytest.raises(smkern.errors.BudgetError, match="above the 16 SMs"):
                torch.ops.smkern.gemm(a, w, num_sms=64)
        torch.cuda.synchronize()
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        del got


def test_two_streams_at_once_with_split_k():
    """Each stream has a workspace of its own."""
    a, w = (torch.randn(s, 16384, device="cuda").to(HALF) for s in (8, 64))
    check_streams(smkern.gemm(a, w), lambda out: smkern.gemm(a, w, out=out))
