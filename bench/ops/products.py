"""Matrix products with something fused to their end: SwiGLU, the residual.

Ours are told that nothing writes their weights, as a decoder tells them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import smkern
from smkern.bench.ops.cases import OpCase
from smkern.bench.ops.rivals import Rivals, if_there, random_of
from smkern.bench.ops.row_wise import torch_silu_and_mul

SMALL = 0.02
"""Standard deviation of weights."""


def torch_gemm_swiglu(a: Tensor, w: Tensor, out: Tensor) -> Sequence[Tensor]:
    return torch_silu_and_mul(a @ w.t(), out)


def gemm_swiglu(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    """FlashInfer has the second half only: its peer is cuBLAS and that."""
    random = random_of(device, 5)
    m, n, k = case["m"], case["n"], case["k"]
    sets = [
        (random(m, k), random(2 * n, k, scale=SMALL), random(m, n)) for _ in range(case.num_sets)
    ]

    def ours(a: Tensor, w: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (smkern.gemm_swiglu(a, w, out=out, static_weights=True),)

    def theirs(a: Tensor, w: Tensor, out: Tensor) -> Sequence[Tensor]:
        flashinfer.activation.silu_and_mul(torch.mm(a, w.t()), out)
        return (out,)

    return Rivals(sets, ours, torch_gemm_swiglu, if_there(flashinfer, theirs))


def torch_gemm_residual(a: Tensor, w: Tensor, residual: Tensor) -> Sequence[Tensor]:
    return (residual.add_(a @ w.t()),)


def gemm_residual(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    """The sum goes where the residual was, as in a decoder's layer."""
    random = random_of(device, 6)
    m, n, k = case["m"], case["n"], case["k"]
    sets = [(random(m, k), random(n, k, scale=SMALL), random(m, n)) for _ in range(case.num_sets)]
    a, w, residual = sets[0]
    kept = residual.clone()
    wanted = (kept.float() + a.float() @ w.float().t(),)

    def ours(a: Tensor, w: Tensor, residual: Tensor) -> Sequence[Tensor]:
        return (smkern.gemm(a, w, residual=residual, out=residual, static_weights=True),)

    def fused(a: Tensor, w: Tensor, residual: Tensor) -> Sequence[Tensor]:
        return (torch.addmm(residual, a, w.t(), out=residual),)

    return Rivals(
        sets,
        ours,
        torch_gemm_residual,
        {"cublas:addmm": fused},
        undo=lambda: residual.copy_(kept),
        reference=wanted,
    )
