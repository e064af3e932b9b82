"""Paged attention and the merge of attention states in plain torch."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import torch
from torch import Tensor

from smkern.ops.reference.fp8 import quantize

_MAX_SCORES = 1 << 24
"""Scores held at once; queries are walked in chunks, so that long contexts fit."""


def query_ranges(
    batch: int, num_tokens: int, cu_q_lens: Tensor | None, max_q_len: int | None
) -> list[tuple[int, int]]:
    """Query tokens [start, end) of each request; one a request where `cu_q_lens` is None.

    What lies outside the tokens is clamped, and a request to its first `max_q_len` tokens.
    """
    if cu_q_lens is None:
        return [(r, r + 1) for r in range(batch)]
    ends = [min(max(int(x), 0), num_tokens) for x in cu_q_lens.tolist()]
    most = num_tokens if max_q_len is None else max_q_len
    return [(start, min(max(end, start), start + most)) for start, end in pairwise(ends)]


def page_ids(
    page_table: Tensor, page_indptr: Tensor | None, request: int, count: int, num_pages: int
) -> Tensor:
    """The first `count` pages of a request, int64 [count]; clamped to its own row and the cache."""
    if page_indptr is None:
        row = page_table[request]
    else:
        total = page_table.shape[0]
        first = min(max(int(page_indptr[request]), 0), total - 1)
        row = page_table[first : max(int(page_indptr[request + 1]), first + 1)]
    entries = torch.arange(count, device=page_table.device)
    return row[entries.clamp(0, row.shape[0] - 1)].long().clamp(0, num_pages - 1)


def gather(cache: Tensor, pages: Tensor, begin: int, end: int) -> Tensor:
    """Keys (or values) [begin, end) of a request as [kv_heads, end - begin, head_dim].

    What lies outside that range is not looked at, so a NaN there reaches nothing.
    """
    size = cache.shape[1]
    keys = torch.arange(begin, end, device=pages.device)
    if cache.element_size() == 1:  # torch cannot index every fp8 tensor
        rows = cache.view(torch.uint8)[pages[keys // size], keys % size].view(cache.dtype)
    else:
        rows = cache[pages[keys // size], keys % size]
    return rows.transpose(0, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    first_key: int,
    *,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of some query tokens of one request.

    Args:
        q: [tokens, q_heads, head_dim], scaled.
        k: [kv_heads, keys, head_dim]; the first key is at position `first_key`.
        v: [kv_heads, keys, head_dim].
        positions: [tokens] of the queries among the keys.

    Returns:
        [tokens, q_heads, head_dim] and the log-sum-exp [tokens, q_heads], in q's dtype.
    """
    tokens, heads, dim = q.shape
    kv_heads, count, _ = k.shape
    grouped = q.view(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2).unsqueeze(1)  # [kv_heads, group, tokens, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = first_key + torch.arange(count, device=q.device)
    seen = torch.ones(tokens, count, dtype=torch.bool, device=q.device)
    if causal:
        seen &= keys <= positions[:, None]
    if window is not None:
        seen &= keys > positions[:, None] - window
    scores = scores.masked_fill(~seen, -inf).permute(2, 0, 1, 3).reshape(tokens, heads, count)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).view(1, -1, 1).expand(tokens, -1, 1)], -1)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else q.new_full((tokens, heads), -inf)
    weights = torch.exp(scores - lse.masked_fill(lse == -inf, 0.0)[..., None])[..., :count]
    weights = weights.view(tokens, kv_heads, heads // kv_heads, count).permute(1, 2, 0, 3)
    out = (weights @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(tokens, heads, dim)
    return out, lse


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_indptr: Tensor | None = None,
    cu_q_lens: Tensor | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    out_scale: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention over a paged cache, request by request, in `compute_dtype`, rounded once.

    With s = scale * k_scale * q·k over the keys that a query sees, softcap * tanh(s / softcap)
    where there is one, and p = softmax(s) with the head's sink in the denominator:
    out = v_scale * p·v, lse = log sum exp(s), the sink included. Lengths are read on the host.

    The arguments are those of `smkern.paged_attention`, and so is what is returned; None of a
    length's limit: no limit. `compute_dtype`: fp32 as the kernels; fp64 for a test's ground truth
    (its lse is fp64, too).
    """
    tokens, heads, dim = q.shape
    wide = compute_dtype if compute_dtype is torch.float64 else torch.float32
    if out is None:
        dtype = q.dtype if out_scale is None else torch.float8_e4m3fn
        out = q.new_zeros(tokens, heads, dim, dtype=dtype)
    lse = torch.full((tokens, heads), -inf, dtype=wide, device=q.device) if lse is None else lse
    k_scale, v_scale = (
        x.to(compute_dtype) if isinstance(x, Tensor) else x for x in (k_scale, v_scale)
    )
    factor = (dim**-0.5 if scale is None else scale) * (1.0 if k_scale is None else k_scale)
    lengths = [max(int(x), 0) for x in kv_lens.tolist()]
    ranges = query_ranges(len(lengths), tokens, cu_q_lens, max_q_len)
    for request, (start, end) in enumerate(ranges):
        if end == start:
            continue
        kv_len = lengths[request] if max_kv_len is None else min(lengths[request], max_kv_len)
        first_position = kv_len - (end - start)
        first_key = 0 if window is None else min(max(first_position - window + 1, 0), kv_len)
        pages = page_ids(
            page_table, page_indptr, request, -(-kv_len // k_cache.shape[1]), k_cache.shape[0]
        )
        k = gather(k_cache, pages, first_key, kv_len).to(compute_dtype)
        v = gather(v_cache, pages, first_key, kv_len).to(compute_dtype)
        step = max(_MAX_SCORES // max(heads * (kv_len - first_key), 1), 1)
        for at in range(start, end, step):
            rows = slice(at, min(at + step, end))
            positions = first_position - start + torch.arange(rows.start, rows.stop).to(q.device)
            result, log_sum = attend(
                q[rows].to(compute_dtype) * factor, k, v, positions, first_key,
                causal=causal, window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
            made = (result if v_scale is None else result * v_scale).to(q.dtype)
            if out_scale is not None:
                scaled, out_scale[rows] = quantize(made.flatten(1), "block")
                made = scaled.view(made.shape)
            out[rows] = made
            lse[rows] = log_sum.to(lse.dtype)
    return out, lse


def merge_states(
    outs: Tensor,
    lses: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention over a union of keys from attention over its parts.

    lse = log sum_i exp(lses_i), out = sum_i exp(lses_i - lse) outs_i. A part that saw no key (lse
    -inf) counts for nothing, whatever its out holds.

    The arguments are those of `smkern.merge_states`. `compute_dtype`: fp32 as the kernels;
    fp64 for a test's ground truth.
    """
    logs = lses.to(compute_dtype)
    total = torch.logsumexp(logs, 0)
    weights = torch.exp(logs - total.masked_fill(total == -inf, 0.0))[..., None]
    merged = torch.where(weights > 0, weights * outs.to(compute_dtype), 0.0).sum(0)
    if lse is None:
        lse = total.to(lses.dtype)
    else:
        lse.copy_(total)
    return merged.to(outs.dtype) if out is None else out.copy_(merged), lse
