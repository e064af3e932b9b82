"""QK norm, RoPE and the write of K and V into their pages, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens belong, each [tokens].

    Attributes:
        request: of the token.
        position: in its request; may be negative where lengths are wrong.
        live: whether the token belongs to a request at all.
        page: in the cache.
        slot: in the page.
        stored: whether it has a page: others are not written.
    """

    request: Tensor
    position: Tensor
    live: Tensor
    page: Tensor
    slot: Tensor
    stored: Tensor


def locate(
    num_tokens: int,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_size: int,
    num_pages: int,
    page_indptr: Tensor | None = None,
    cu_q_lens: Tensor | None = None,
) -> Places:
    """Find each token's request, position, page and slot.

    Args:
        num_tokens: rows of q, k and v.
        page_table: [batch, max_pages] int32, or [total] with `page_indptr`.
        kv_lens: [batch] int32, the new tokens included.
        page_size: tokens of a page.
        num_pages: of the cache; other ids are no pages.
        page_indptr: [batch + 1] int32 where the table is flat.
        cu_q_lens: [batch + 1] int32; None: one token a request.
    """
    token = torch.arange(num_tokens, device=kv_lens.device)
    lens = kv_lens.long().clamp(min=0)
    if cu_q_lens is None:
        request, live = token, torch.ones_like(token, dtype=torch.bool)
        position = lens - 1
    else:
        starts = cu_q_lens.long()
        last = max(kv_lens.shape[0] - 1, 0)
        request = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, last)
        live = (token >= starts[request]) & (token < starts[request + 1])
        position = lens[request] - starts[request + 1] + token
    entry, slot = position.clamp(min=0) // page_size, position.clamp(min=0) % page_size
    if page_indptr is None:
        at = request * page_table.shape[1] + entry
        stored = live & (position >= 0) & (entry < page_table.shape[1])
    else:
        bounds = page_indptr.long()
        at = bounds[request] + entry
        stored = live & (position >= 0) & (at < bounds[request + 1])
        stored &= (at >= 0) & (at < page_table.shape[0])
    flat = page_table.reshape(-1)
    page = flat[torch.where(stored, at, 0)].long() if flat.numel() else torch.zeros_like(at)
    stored &= (page >= 0) & (page < num_pages)
    return Places(request, position, live, page, slot, stored)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the leading dimensions of each head by an angle a pair.

    Args:
        x: [tokens, heads, head_dim].
        cos: [tokens, rotary_dim / 2].
        sin: [tokens, rotary_dim / 2].
        interleaved: pairs are neighbours, else a half apart.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    one, two = first * cos - second * sin, second * cos + first * sin
    both = torch.stack([one, two], -1).flatten(-2) if interleaved else torch.cat([one, two], -1)
    return torch.cat([both, rest], -1)


def store(x: Tensor, cache: Tensor, places: Places, scale: float | Tensor | None) -> None:
    """Write rows [tokens, kv_heads, head_dim] into their pages; fp8: x / scale, saturated."""
    if cache.dtype is FP8:
        factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32)
        factor = factor.to(x.device).reshape(()).reciprocal().to(x.dtype)
        x = (x * factor).clamp(-FP8_MAX, FP8_MAX)
    rows = x[places.stored].to(cache.dtype)
    page, slot = places.page[places.stored], places.slot[places.stored]
    if cache.element_size() == 1:  # torch cannot index every fp8 tensor
        cache.view(torch.uint8)[page, slot] = rows.view(torch.uint8)
    else:
        cache[page, slot] = rows


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_indptr: Tensor | None = None,
    cu_q_lens: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write new keys and values into their pages; see `smkern.append_kv`."""
    places = locate(
        k.shape[0], page_table, kv_lens, page_size=k_cache.shape[1], num_pages=k_cache.shape[0],
        page_indptr=page_indptr, cu_q_lens=cu_q_lens,
    )  # fmt: skip
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        store(x.float() if cache.dtype is FP8 else x, cache, places, scale)


def qk_norm_rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    cos_sin: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    positions: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cu_q_lens: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Norm and turn q and k in `compute_dtype`, rounded once; q into `out`, k and v into pages.

    The arguments are those of `smkern.qk_norm_rope_append`.

    Returns:
        `out`, or a new tensor that is zero for tokens of no request.
    """
    places = locate(
        q.shape[0], page_table, kv_lens, page_size=k_cache.shape[1], num_pages=k_cache.shape[0],
        page_indptr=page_indptr, cu_q_lens=cu_q_lens,
    )  # fmt: skip
    made = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        y = x.to(compute_dtype)
        if weight is not None:
            y = rms_norm(y, weight, eps)
        if cos_sin is not None:
            where = places.position if positions is None else positions.long()
            row = cos_sin[where.clamp(0, cos_sin.shape[0] - 1)].to(compute_dtype)
            y = rotate(y, *row.chunk(2, -1), interleaved=interleaved)
        made.append(y)
    store(made[1], k_cache, places, k_scale)
    store(v.to(compute_dtype) if v_cache.dtype is FP8 else v, v_cache, places, v_scale)
    turned = made[0].to(q.dtype)
    out = torch.zeros_like(turned) if out is None else out
    out[places.live] = turned[places.live]
    return out
