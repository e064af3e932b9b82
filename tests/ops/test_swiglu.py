"""`smkern.gemm_swiglu` on CPU tensors and in torch.library; what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import smkern
from smkern.errors import ArgumentError, BudgetError

pytestmark = pytest.mark.slow

HALF = torch.bfloat16


def operands(m=5, inner=12, k=16, dtype=HALF):
    return torch.randn(m, k).to(dtype), torch.randn(2 * inner, k).to(dtype)


def unfused(a, w):
    """As Hugging Face's MLP computes it, in fp32."""
    half = w.shape[0] // 2
    gate, up = (torch.nn.functional.linear(a.float(), part.float()) for part in w.split(half))
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
def test_values(dtype):
    a, w = operands(dtype=dtype)
    want = unfused(a, w).to(dtype)
    assert torch.allclose(smkern.gemm_swiglu(a, w), want, rtol=2e-2, atol=1e-5)
    out = torch.full((5, 20), float("nan"), dtype=dtype)[:, 4:16]
    assert smkern.gemm_swiglu(a, w, out=out, num_sms=3, static_weights=True) is out
    assert torch.equal(out, smkern.gemm_swiglu(a, w))


@pytest.mark.parametrize(("m", "inner", "k"), [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
def test_zero_sizes(m, inner, k):
    got = smkern.gemm_swiglu(*operands(m, inner, k))
    assert got.shape == (m, inner)
    assert not got.any()


def test_what_is_refused():
    a, w = operands()
    out = torch.full((5, 12), 7.0, dtype=HALF)
    shared = torch.zeros(8, 16, dtype=HALF)
    bad = [
        ((a, w[:23]), {}, "w_gate_up has 23 rows, wanted an even number"),
        ((a, w[:, :15]), {}, r"w_gate_up has shape \[24, 15\]"),
        ((a, w.float()), {}, "w_gate_up is torch.float32"),
        ((a[0], w), {}, "a has shape"),
        ((None, w), {}, "a is NoneType"),
        ((a, None), {}, "w_gate_up is NoneType"),
        ((a, w), {"out": torch.empty(5, 24, dtype=HALF)}, r"out has shape \[5, 24\].*\[5, 12\]"),
        ((a, w), {"out": torch.empty(5, 12)}, "out is torch.float32"),
        ((a, w), {"out": out[:1].expand(5, 12)}, "share an address"),
        ((a, w), {"backend": "magic"}, "backend='magic'"),
        ((shared[:5], shared), {"out": shared[2:7, :4]}, "out at .* overlaps a"),
    ]
    for tensors, options, words in bad:
        with pytest.raises(ArgumentError, match=words):
            smkern.gemm_swiglu(*tensors, **options)
    with pytest.raises(BudgetError, match="num_sms=0"):
        smkern.gemm_swiglu(a, w, out=out, num_sms=0)
    assert (out == 7).all()


@pytest.mark.parametrize("options", [{}, {"num_sms": 3, "static_weights": True}])
def test_opcheck(options):
    a, w = operands()
    opcheck(torch.ops.smkern.gemm_swiglu.default, (a, w), options)
    out = torch.empty(5, 12, dtype=HALF)
    opcheck(torch.ops.smkern.gemm_swiglu_out.default, (a, w, out), options)


def test_compiled_without_a_break():
    a, w = operands()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def layer(a, w, out, num_sms):
        smkern.gemm_swiglu(a, w, out=out, num_sms=num_sms)
        return smkern.gemm_swiglu(a, w, num_sms=num_sms, static_weights=True) + out

    for num_sms in (None, 4, 77):
        out = torch.empty(5, 12, dtype=HALF)
        assert torch.equal(layer(a, w, out, num_sms), 2 * smkern.gemm_swiglu(a, w))


def test_fake_and_meta_tensors_get_shapes_only():
    with FakeTensorMode():
        got = smkern.gemm_swiglu(torch.empty(5, 16, dtype=HALF), torch.empty(24, 16, dtype=HALF))
        assert (got.shape, got.dtype) == ((5, 12), HALF)
        with pytest.raises((ArgumentError, RuntimeError)):
            smkern.gemm_swiglu(torch.empty(5, 16), torch.empty(23, 16))
    made = smkern.gemm_swiglu(*(x.to("meta") for x in operands()))
    assert made.device.type == "meta"
    assert made.shape == (5, 12)


def test_explained_for_the_shipped_gpu():
    why = smkern.explain_gemm_swiglu(64, 14336, 4096, num_sms=32, confined="mask")
    assert why.problem.n == 28672
    assert why.problem.epilogue.swiglu
    assert "swiglu" in str(why)
    needed = smkern.gemm_swiglu_workspace_bytes(64, 14336, 4096, backend="unfused")
    assert needed >= 64 * 28672 * 2
    odd = smkern.explain_gemm_swiglu(64, 12, 16)
    assert odd.config.kernel == "pointer"
    with pytest.raises(ArgumentError, match="inner=0"):
        smkern.explain_gemm_swiglu(64, 0, 4096)


def test_calls_to_come_are_checked():
    smkern.SwigluCalls(shapes=[(14336, 4096)])
    for wrong in ({"shapes": [(0, 8)]}, {"shapes": [(8, 8)], "max_m": 0}):
        with pytest.raises(ArgumentError):
            smkern.SwigluCalls(**wrong)
