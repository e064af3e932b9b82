"""Small tensors on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def rows(count: int = 5, cols: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, cols).to(dtype)


def misplaced(x: Tensor) -> Tensor:
    """The same numbers, contiguous, one element behind whole 16 bytes."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As engines have it while they make layers and process their weights: the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
