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

    The arguments are those of `smkern.gemm_swiglu`, of any floating dtype, and those of `gemm`.
    """
    wide = w_gate_up.to(compute_dtype).t()

    def gated(a: Tensor) -> Tensor:
        gate, up = (a.to(compute_dtype) @ wide).chunk(2, dim=1)
        return functional.silu(gate) * up

    product = by_rows(gated, a) if batch_invariant else gated(a)
    return product.to(out_dtype or a.dtype) if out is None else out.copy_(product)
