"""RMS norm, SiLU times up and rows of a table in plain torch, rounded as Hugging Face's layers."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """round(round(x / sqrt(mean(x²) + eps)) * weight) in x's dtype: the quotient in fp32.

    Args:
        x: [tokens, hidden].
        weight: [hidden], x's dtype or fp32.
        eps: Added to the mean.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """residual += x, in place and rounded; the norm of that.

    Args:
        x: [tokens, hidden].
        residual: [tokens, hidden]; written.
        weight: [hidden].
        eps: Added to the mean.
    """
    residual.copy_((residual.float() + x.float()).to(residual.dtype))
    return rms_norm(residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x [tokens, 2 * I], gate first; both steps rounded to x's dtype."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids], zeros for an id outside the table.

    Args:
        ids: [tokens], int32 or int64.
        table: [rows, hidden].
    """
    inside = (ids >= 0) & (ids < table.shape[0])
    if not table.shape[0]:
        return table.new_zeros(ids.shape[0], table.shape[1])
    found = table[torch.where(inside, ids, 0).long()]
    return found.masked_fill(~inside[:, None], 0)
