"""GEMM with its epilogue in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Apply the epilogue's activation; GELU is the exact one (erf), as in `torch.nn.functional`."""
    if activation is None:
        return x
    return functional.silu(x) if activation == "silu" else functional.gelu(x)


def by_rows(work: Callable[..., Tensor], *matrices: Tensor | None) -> Tensor:
    """What `work` makes of matrices, each row computed as if it were alone.

    A BLAS sums in an order that depends on the number of rows, and on how memory is aligned: so
    every row gets memory of its own.
    """
    count = next(len(x) for x in matrices if x is not None)
    if count == 0:
        return work(*matrices)
    rows = ([None if x is None else x[i : i + 1].clone() for x in matrices] for i in range(count))
    return torch.cat([work(*row) for row in rows])


def gemm(
    a: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """out = act(a @ w.T + bias) + residual, in `compute_dtype`, rounded once at the end.

    The arguments are those of `smkern.gemm`, of any floating dtype. `compute_dtype`: fp32 as the
    kernels accumulate; fp64 for a test's ground truth. `out_dtype`: of a new result; None: `a`'s.
    """
    wide, added = w.to(compute_dtype).t(), None if bias is None else bias.to(compute_dtype)

    def product(a: Tensor, residual: Tensor | None) -> Tensor:
        acc = a.to(compute_dtype) @ wide
        if added is not None:
            acc = acc + added
        acc = activate(acc, activation)
        return acc if residual is None else acc + residual.to(compute_dtype)

    acc = by_rows(product, a, residual) if batch_invariant else product(a, residual)
    if out is None:
        return acc.to(out_dtype or a.dtype)
    return out.copy_(acc)
