"""GEMM with its epilogue in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Apply the epilogue's activation; GELU is the exact one (erf), as in `torch.nn.functional`."""
    if activation is None:
        return x
    return functional.silu(x) if activation == "silu" else functional.gelu(x)


def gemm(
    a: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """out = act(a @ w.T + bias) + residual, in `compute_dtype`, rounded once at the end.

    Args:
        a: [M, K], any floating dtype.
        w: [N, K], same dtype.
        bias: [N], added to every row before the activation.
        residual: [M, N], added after it; may be `out` itself.
        activation: None, "silu" or "gelu".
        out: [M, N] to write into; a new tensor of `a`'s dtype without it.
        compute_dtype: fp32 as the kernels accumulate; fp64 for a test's ground truth.

    Returns:
        [M, N] in `a`'s dtype (in `out`, if given).
    """
    acc = a.to(compute_dtype) @ w.to(compute_dtype).t()
    if bias is not None:
        acc = acc + bias.to(compute_dtype)
    acc = activate(acc, activation)
    if residual is not None:
        acc = acc + residual.to(compute_dtype)
    if out is None:
        return acc.to(a.dtype)
    return out.copy_(acc)
