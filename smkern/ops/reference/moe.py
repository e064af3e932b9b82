"""The operators of a mixture of experts in plain torch: routing, permutation, grouped GEMM."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from smkern.ops.reference.gemm import by_rows


def topk_softmax(logits: Tensor, top_k: int, *, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """The `top_k` largest of each row's softmax, in fp32; of equals the lower expert.

    Weights fp32 and experts int32, each [tokens, top_k], the largest first.
    """
    shares = logits.float().softmax(-1)
    order = shares.nan_to_num(0.0).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = shares.gather(1, order)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, order.to(torch.int32)


def places(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Where each choice goes: behind those of lower experts, and the earlier of its own.

    Args:
        experts: int32 of any shape; what is no expert goes nowhere.
        num_experts: How many there are.

    Returns:
        Offsets [num_experts + 1] and places [choices], int32; -1 is nowhere.
    """
    chosen = experts.flatten().long()
    known = (chosen >= 0) & (chosen < num_experts)
    order = torch.where(known, chosen, num_experts).argsort(stable=True)
    index = torch.empty_like(chosen)
    index[order] = torch.arange(chosen.numel(), device=chosen.device)
    index[~known] = -1
    offsets = chosen.new_zeros(num_experts + 1)
    offsets[1:] = torch.bincount(chosen[known], minlength=num_experts).cumsum(0)
    return offsets.to(torch.int32), index.to(torch.int32)


def moe_permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's row once a choice, sorted by expert; see `smkern.moe_permute`."""
    offsets, index = places(experts, num_experts)
    known = index >= 0
    rows = x.new_zeros(index.numel(), x.shape[1])
    tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(experts.shape[1])
    rows[index[known].long()] = x[tokens[known]]
    return rows, offsets, index


def grouped_gemm(
    a: Tensor,
    w: Tensor,
    expert_offsets: Tensor,
    *,
    swiglu: bool = False,
    batch_invariant: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Each expert's rows times its weights; products in `compute_dtype`, rounded once.

    Args:
        a: [rows, k].
        w: [experts, n, k]; with `swiglu` gate rows, then up rows.
        expert_offsets: [experts + 1] int32; what lies outside the rows is cut.
        swiglu: silu(gate) * up.
        batch_invariant: A row's bits depend on the row and its expert alone.
        compute_dtype: Dtype that products are summed in.

    Returns:
        [rows, n], or [rows, n / 2] with `swiglu`; zeros in rows of no expert.
    """
    n = w.shape[1] // 2 if swiglu else w.shape[1]
    out = a.new_zeros(a.shape[0], n)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        found = rows.to(compute_dtype) @ weights
        if not swiglu:
            return found
        return torch.nn.functional.silu(found[:, :n]) * found[:, n:]

    bounds = expert_offsets.clamp(0, a.shape[0]).tolist()
    for expert in range(w.shape[0]):
        begin, end = bounds[expert], bounds[expert + 1]
        if end <= begin:
            continue
        times = partial(product, weights=w[expert].to(compute_dtype).T)
        rows = a[begin:end]
        out[begin:end] = (by_rows(times, rows) if batch_invariant else times(rows)).to(a.dtype)
    return out


def moe_unpermute(
    y: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    residual: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Each token's weighted sum of its choices' rows, in order, then the residual; rounded once.

    `compute_dtype` is that of the sum; see `smkern.moe_unpermute`.
    """
    tokens, top_k = weights.shape
    total = torch.zeros(tokens, y.shape[1], dtype=compute_dtype, device=y.device)
    if y.shape[0]:
        for j, at in enumerate(index.view(tokens, top_k).long().unbind(1)):
            known = (at >= 0) & (at < y.shape[0])
            rows = y[at.clamp(0, y.shape[0] - 1)].to(compute_dtype)
            product = weights[:, j : j + 1].to(compute_dtype) * rows
            total += torch.where(known[:, None], product, 0.0)
    if residual is not None:
        total += residual.to(compute_dtype)
    return total.to(y.dtype)
