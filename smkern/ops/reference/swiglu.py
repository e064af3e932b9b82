"""GEMM with SwiGLU in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from smkern.ops.reference.gemm import by_rows


def gemm_swiglu(
    a: Tensor,
    w_gate_up: Tensor,
    *,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """out = silu(a @ gate^T) * (a @ up^T), in `compute_dtype`, rounded once at the end.

    Args:
        a: [M, K], any floating dtype.
        w_gate_up: [2 * I, K], the gate's rows, then up's; same dtype.
        out: [M, I] to write into; a new tensor of `a`'s dtype without it.
        batch_invariant: A row's bits depend on that row alone.
        compute_dtype: fp32 as the kernels accumulate; fp64 for a test's ground truth.
        out_dtype: Dtype of a new result; None: `a`'s.

    Returns:
        [M, I] in `out_dtype` (in `out`, if given).
    """
    wide = w_gate_up.to(compute_dtype).t()

    def gated(a: Tensor) -> Tensor:
        gate, up = (a.to(compute_dtype) @ wide).chunk(2, dim=1)
        return functional.silu(gate) * up

    product = by_rows(gated, a) if batch_invariant else gated(a)
    return product.to(out_dtype or a.dtype) if out is None else out.copy_(product)
