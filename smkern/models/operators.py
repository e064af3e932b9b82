"""The operators that a decoder is made of, those that smkern has and plain torch for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import smkern
from smkern.ops import (
    embedding,
    gemm,
    gemm_swiglu,
    paged_attention,
    qk_norm_rope_append,
    rms_norm,
    sample,
)

__all__ = [
    "embedding",
    "gemm",
    "gemm_swiglu",
    "grouped_gemm",
    "moe_permute",
    "moe_unpermute",
    "paged_attention",
    "qk_norm_rope_append",
    "rms_norm",
    "sample",
    "topk_softmax",
]


def _ours(name: str) -> Any:
    return getattr(smkern, name, None)


def topk_softmax(logits: Tensor, top_k: int, *, renormalize: bool, out: Any, num_sms: Any) -> Any:
    if own := _ours("topk_softmax"):
        return own(logits, top_k, renormalize=renormalize, out=out, num_sms=num_sms)
    weights, experts = logits.float().softmax(-1).sort(stable=True, dim=-1, descending=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return out[0].copy_(weights), out[1].copy_(experts)


def moe_permute(x: Tensor, experts: Tensor, num_experts: int, *, out: Any, num_sms: Any) -> Any:
    if own := _ours("moe_permute"):
        return own(x, experts, num_experts, out=out, num_sms=num_sms)
    rows, offsets, index = out
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    rows.copy_(x[order // experts.shape[1]])
    index[order] = torch.arange(len(order), dtype=index.dtype, device=x.device)
    offsets[0] = 0
    offsets[1:].copy_(torch.bincount(flat, minlength=num_experts).cumsum(0))
    return out


def grouped_gemm(
    a: Tensor, w: Tensor, offsets: Tensor, *, out: Tensor, num_sms: Any, swiglu: bool = False
) -> Tensor:
    if own := _ours("grouped_gemm"):
        return own(a, w, offsets, swiglu=swiglu, out=out, num_sms=num_sms)
    bounds = offsets.tolist()
    for expert in range(w.shape[0]):
        rows = slice(bounds[expert], bounds[expert + 1])
        result = a[rows].float() @ w[expert].float().t()
        if swiglu:
            gate, up = result.chunk(2, -1)
            result = functional.silu(gate) * up
        out[rows] = result.to(out.dtype)
    return out


def moe_unpermute(
    y: Tensor, index: Tensor, weights: Tensor, *, residual: Tensor, out: Tensor, num_sms: Any
) -> Tensor:
    if own := _ours("moe_unpermute"):
        return own(y, index, weights, residual=residual, out=out, num_sms=num_sms)
    rows = y[index.long()].view(*weights.shape, -1).float()
    return out.copy_((rows * weights[..., None]).sum(1) + residual.float())
