"""Whether two tensors are the same to the bit, NaN and signs of zeros too."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
