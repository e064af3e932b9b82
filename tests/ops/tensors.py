"""Small tensors on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(count: int = 5, cols: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, cols).to(dtype)


def misplaced(x: Tensor) -> Tensor:
    """The same numbers, contiguous, one element behind whole 16 bytes."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
