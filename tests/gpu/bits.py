"""Tensors copied and compared bit for bit, NaN and signs of zeros too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def twin(x: Any) -> Any:
    """The same over memory of its own, strides kept; what is no tensor is itself."""
    if not isinstance(x, Tensor):
        return x
    other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    if x.element_size() == 1:
        other.view(torch.uint8).copy_(x.view(torch.uint8))
        return other
    return other.copy_(x)
