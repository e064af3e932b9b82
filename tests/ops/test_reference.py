"""The plain-torch GEMM against float64."""

from __future__ import annotations

import pytest
import torch

import smkern.ops
from smkern.errors import ArgumentError, BudgetError
from smkern.ops.reference import gemm as reference

EPILOGUES = [(b, r, act) for b in (0, 1) for r in (0, 1) for act in (None, "silu", "gelu")]


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    shapes = ((m, k), (n, k), (n,), (m, n))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def exact(a, w, bias, residual, activation):
    """The definition, in float64 and by hand."""
    x = a.double() @ w.double().t()
    if bias is not None:
        x = x + bias.double()
    if activation == "silu":
        x = x / (1 + torch.exp(-x))
    if activation == "gelu":
        x = 0.5 * x * (1 + torch.erf(x / 2**0.5))
    return x if residual is None else x + residual.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("has_bias", "has_residual", "activation"), EPILOGUES)
def test_matches_float64_within_one_rounding(dtype, has_bias, has_residual, activation):
    a, w, bias, residual = operands(13, 21, 67, dtype)
    bias, residual = bias if has_bias else None, residual if has_residual else None
    got = smkern.ops.gemm(a, w, bias=bias, residual=residual, activation=activation)
    want = exact(a, w, bias, residual, activation)
    assert got.dtype is dtype
    tolerance = 1.01 * torch.finfo(dtype).eps / 2 * want.abs() + 2e-5
    assert ((got.double() - want).abs() <= tolerance).all()


def test_activation_comes_before_the_residual():
    a, w = torch.tensor([[-1.0]]), torch.tensor([[4.0]])
    residual = torch.tensor([[10.0]])
    got = reference.gemm(a, w, residual=residual, activation="silu")
    assert got.item() == pytest.approx(10 - 4 / (1 + 2.718281828**4), abs=1e-6)


def test_out_may_be_the_residual():
    a, w, _, residual = operands(4, 8, 16, torch.float16)
    want = smkern.ops.gemm(a, w, residual=residual)
    got = smkern.ops.gemm(a, w, residual=residual, out=residual)
    assert got is residual
    assert torch.equal(got, want)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 8), (3, 0, 8), (3, 4, 0), (0, 0, 0)])
def test_zero_sizes(m, n, k):
    a, w, bias, residual = operands(m, n, k, torch.bfloat16)
    got = smkern.ops.gemm(a, w, bias=bias, residual=residual)
    assert got.shape == (m, n)
    if k == 0 and m and n:
        assert torch.equal(got, (bias.float() + residual.float()).bfloat16())


def test_cpu_calls_check_like_gpu_calls():
    a, w, *_ = operands(3, 4, 8, torch.bfloat16)
    with pytest.raises(BudgetError, match=r"num_sms=0.*at least 1"):
        smkern.ops.gemm(a, w, num_sms=0)
    smkern.ops.gemm(a, w, num_sms=10**6)  # there is no device that it could exceed
    with pytest.raises(ArgumentError, match="overlaps a"):
        smkern.ops.gemm(a, w, out=a[:, :4])
    with pytest.raises(ArgumentError, match="pass both scales of e4m3"):
        smkern.ops.gemm(a, w, w_scale=torch.ones(1))


def test_the_result_requires_no_gradient():
    a, w, *_ = operands(3, 4, 8, torch.float32)
    assert not smkern.ops.gemm(a, torch.nn.Parameter(w)).requires_grad
