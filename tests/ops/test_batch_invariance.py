"""A row's bits depend on that row alone, on CPU tensors too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import smkern

SIZES = [(7, 96, 64), (33, 128, 256), (20, 47, 1001)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=SIZES, ids=str)
def sizes(request: Any) -> tuple[int, int, int]:
    torch.manual_seed(0)
    return request.param


def elsewhere(row: Tensor) -> Tensor:
    """The row by itself, where no vector begins."""
    room = torch.empty(row.numel() + 1, dtype=row.dtype)[1:]
    return room.copy_(row).view(1, -1)


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm(sizes, dtype, activation):
    m, n, k = sizes
    a, w, bias, residual = (torch.randn(s).to(dtype) for s in ((m, k), (n, k), (n,), (m, n)))
    options: dict[str, Any] = {"bias": bias, "activation": activation, "batch_invariant": True}
    batch = smkern.gemm(a, w, residual=residual, **options)
    for i in range(m):
        alone = smkern.gemm(elsewhere(a[i]), w, residual=residual[i : i + 1], **options)
        assert torch.equal(batch[i], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_swiglu(sizes, dtype):
    m, n, k = sizes
    a, w = torch.randn(m, k).to(dtype), torch.randn(2 * n, k).to(dtype)
    batch = smkern.gemm_swiglu(a, w, batch_invariant=True)
    for i in range(m):
        alone = smkern.gemm_swiglu(elsewhere(a[i]), w, batch_invariant=True)
        assert torch.equal(batch[i], alone[0])


@pytest.mark.parametrize("swiglu", [False, True])
def test_grouped_gemm(sizes, swiglu):
    m, n, k = sizes
    a, w = torch.randn(m, k), torch.randn(2, 2 * n, k)
    cut = m // 3
    batch = smkern.grouped_gemm(a, w, torch.tensor([0, cut, m]).int(), swiglu=swiglu)
    for i in range(m):
        offsets = torch.tensor([0, 1, 1] if i < cut else [0, 0, 1]).int()
        alone = smkern.grouped_gemm(elsewhere(a[i]), w, offsets, swiglu=swiglu)
        assert torch.equal(batch[i], alone[0])


def test_a_batch_without_rows():
    w = torch.randn(6, 4)
    assert smkern.gemm(torch.ones(0, 4), w, batch_invariant=True).shape == (0, 6)
    assert smkern.gemm_swiglu(torch.ones(0, 4), w, batch_invariant=True).shape == (0, 3)
