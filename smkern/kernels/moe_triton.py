"""MoE routing and un-permutation in Triton: top-k of a softmax, weighted sum of rows.

Every grid computes a row in the same way, so its bits depend on the row only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def topk_softmax_rows(
    logits_ptr, weights_ptr, experts_ptr, logits_stride, weights_stride, experts_stride, tokens,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    ROWS: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The K largest of each row's softmax over EXPERTS, by K rounds of argmax; the first of ties.

    Loads are single elements on purpose: with vector loads the logits' alignment would decide how a
    row's sum is split over lanes.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, PAD)
    nth = tl.arange(0, K_PAD)
    for item in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = item * ROWS + tl.arange(0, ROWS)
        live = row < tokens
        at = logits_ptr + row.to(tl.int64)[:, None] * logits_stride + column[None, :]
        real = (column < EXPERTS)[None, :]
        x = tl.load(at, mask=live[:, None] & real, other=0.0).to(tl.float32)
        x = tl.where(real, x, float("-inf"))
        exps = tl.exp(x - tl.max(x, 1)[:, None])
        share = exps / tl.sum(exps, 1)[:, None]
        # a row with a NaN becomes all NaN: it gets valid experts, with NaN as weights
        broken = tl.max((share != share).to(tl.int32), 1) != 0
        rank = tl.where(real, tl.where(share == share, share, 0.0), -1.0)
        weights = tl.zeros([ROWS, K_PAD], tl.float32)
        experts = tl.zeros([ROWS, K_PAD], tl.int32)
        for i in tl.static_range(K):
            most, chosen = tl.max(rank, 1, return_indices=True, return_indices_tie_break_left=True)
            weights = tl.where(nth[None, :] == i, most[:, None], weights)
            experts = tl.where(nth[None, :] == i, chosen[:, None], experts)
            rank = tl.where(column[None, :] == chosen[:, None], -1.0, rank)
        if RENORMALIZE:
            weights = weights / tl.sum(weights, 1)[:, None]
        weights = tl.where(broken[:, None], float("nan"), weights)
        wanted = live[:, None] & (nth < K)[None, :]
        row_at = row.to(tl.int64)[:, None]
        tl.store(weights_ptr + row_at * weights_stride + nth[None, :], weights, mask=wanted)
        tl.store(experts_ptr + row_at * experts_stride + nth[None, :], experts, mask=wanted)


@triton.jit
def unpermute_rows(
    y_ptr, index_ptr, weights_ptr, residual_ptr, out_ptr,
    y_stride, weights_stride, residual_stride, out_stride, tokens, num_rows, hidden,
    K: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j of weights[t, j] * y[index[t, j]] in order of j, + residual[t].

    Strides of y, residual and out and `hidden` count UNIT elements. An index out of range adds
    nothing.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(hidden * UNIT, BLOCK)
    for item in range(tl.program_id(0), tl.cdiv(tokens, TOKENS) * blocks, tl.num_programs(0)):
        token = item // blocks * TOKENS + tl.arange(0, TOKENS)
        live = token < tokens
        column = item % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = (column < hidden * UNIT)[None, :]
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for j in tl.static_range(K):
            at = tl.load(index_ptr + token.to(tl.int64) * K + j, mask=live, other=-1)
            known = (at >= 0) & (at < num_rows)
            weight = tl.load(
                weights_ptr + token.to(tl.int64) * weights_stride + j, mask=known, other=0.0
            )
            offset = at.to(tl.int64)[:, None] * y_stride * UNIT + column[None, :]
            y = tl.load(y_ptr + offset, mask=known[:, None] & inside, other=0.0)
            total += weight[:, None] * y.to(tl.float32)
        mask = live[:, None] & inside
        if RESIDUAL:
            offset = token.to(tl.int64)[:, None] * residual_stride * UNIT + column[None, :]
            total += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        offset = token.to(tl.int64)[:, None] * out_stride * UNIT + column[None, :]
        tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=mask)
