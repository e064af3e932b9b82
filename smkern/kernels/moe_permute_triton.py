"""Sorts rows by expert, in Triton: the position of each (token, choice), and the copy of its row.

Each of the T * K choices goes behind all choices of lower experts and behind earlier choices of its
own expert: integer counts, so the order is the same with any grid. No CTA waits for another. Few
choices are compared with each other in every CTA; many are counted by blocks in an earlier launch.
Rows are copied as 16-bit words, whatever their dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _choices(first, TOKENS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, tokens):
    """Indices of TOKENS tokens' choices among all, and which of them exist."""
    slot = tl.arange(0, TOKENS * K_PAD)
    token = first + slot // K_PAD
    nth = slot % K_PAD
    return token * K + nth, (token < tokens) & (nth < K)


@triton.jit
def _experts(experts_ptr, at, mask, num_experts):
    """Experts of choices; NOWHERE if masked or out of range."""
    expert = tl.load(experts_ptr + at, mask=mask, other=-1)
    return tl.where((expert >= 0) & (expert < num_experts), expert, NOWHERE)


@triton.jit
def _copy(
    x_ptr, rows_ptr, place, first, tokens, x_stride, rows_stride, hidden,
    TOKENS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Write each token's row to the K positions of its choices; -1 means none."""
    token = first + tl.arange(0, TOKENS)
    places = place.reshape(TOKENS, K_PAD)
    nth = tl.arange(0, K_PAD)[None, :]
    for begin in range(0, hidden * UNIT, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = (column < hidden * UNIT)[None, :]
        offset = token.to(tl.int64)[:, None] * x_stride * UNIT + column[None, :]
        x = tl.load(x_ptr + offset, mask=(token < tokens)[:, None] & inside, other=0)
        for j in tl.static_range(K):
            row = tl.sum(tl.where(nth == j, places, 0), 1)
            at = rows_ptr + row.to(tl.int64)[:, None] * rows_stride * UNIT + column[None, :]
            tl.store(at, x, mask=((row >= 0) & (token < tokens))[:, None] & inside)


@triton.jit
def permute_few(
    x_ptr, experts_ptr, rows_ptr, offsets_ptr, index_ptr, x_stride, rows_stride, tokens,
    num_experts, hidden,
    TOKENS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compare each choice with all others: a single launch, for few tokens.

    Items are TOKENS tokens, then OFFSETS of the num_experts + 1 offsets.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tokens * K
    groups = tl.cdiv(tokens, TOKENS)
    items = groups + tl.cdiv(num_experts + 1, OFFSETS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item < groups:
            at, live = _choices(item * TOKENS, TOKENS, K, K_PAD, tokens)
            mine = _experts(experts_ptr, at, live, num_experts)
            place = tl.zeros_like(at)
            for begin in range(0, total, CHUNK):
                i = begin + tl.arange(0, CHUNK)
                other = _experts(experts_ptr, i, i < total, num_experts)[None, :]
                earlier = (other == mine[:, None]) & (i[None, :] < at[:, None])
                place += tl.sum(((other < mine[:, None]) | earlier).to(tl.int32), 1)
            place = tl.where(mine == NOWHERE, -1, place)
            tl.store(index_ptr + at, place, mask=live)
            _copy(
                x_ptr, rows_ptr, place, item * TOKENS, tokens, x_stride, rows_stride, hidden,
                TOKENS, K, K_PAD, BLOCK, UNIT,
            )  # fmt: skip
        else:
            expert = (item - groups) * OFFSETS + tl.arange(0, OFFSETS)
            offset = tl.zeros_like(expert)
            for begin in range(0, total, CHUNK):
                i = begin + tl.arange(0, CHUNK)
                other = _experts(experts_ptr, i, i < total, num_experts)[None, :]
                offset += tl.sum((other < expert[:, None]).to(tl.int32), 1)
            tl.store(offsets_ptr + expert, offset, mask=expert <= num_experts)


@triton.jit
def count_experts(
    experts_ptr, counts_ptr, total, num_experts,
    PAD: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[block, expert] for each block of COUNTED choices; rows are PAD experts wide."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for block in range(tl.program_id(0), tl.cdiv(total, COUNTED), tl.num_programs(0)):
        i = block * COUNTED + tl.arange(0, COUNTED)
        expert = _experts(experts_ptr, i, i < total, num_experts)
        known = expert != NOWHERE
        counts = tl.histogram(tl.where(known, expert, 0), PAD, mask=known)
        tl.store(counts_ptr + block * PAD + tl.arange(0, PAD), counts)


@triton.jit
def _before(
    counts_ptr, experts_ptr, first, total, num_experts,
    PAD: tl.constexpr, COUNTED: tl.constexpr, COUNTS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """For each expert: the number of choices in total, and before choice `first`."""
    expert = tl.arange(0, PAD)
    whole = first // COUNTED
    every = tl.zeros([PAD], tl.int32)
    before = tl.zeros([PAD], tl.int32)
    blocks = tl.cdiv(total, COUNTED)
    for begin in range(0, blocks, COUNTS):
        block = begin + tl.arange(0, COUNTS)[:, None]
        counts = tl.load(counts_ptr + block * PAD + expert[None, :], mask=block < blocks, other=0)
        every += tl.sum(counts, 0)
        before += tl.sum(tl.where(block < whole, counts, 0), 0)
    for begin in range(whole * COUNTED, first, HEAD):
        i = begin + tl.arange(0, HEAD)
        mine = _experts(experts_ptr, i, i < first, num_experts)
        before += tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
    return every, before


@triton.jit
def permute_many(
    x_ptr, experts_ptr, counts_ptr, rows_ptr, offsets_ptr, index_ptr, x_stride, rows_stride,
    tokens, share, num_experts, hidden,
    PAD: tl.constexpr, COUNTED: tl.constexpr, COUNTS: tl.constexpr, HEAD: tl.constexpr,
    TOKENS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Permute with the counts of `count_experts`: `share` tokens per CTA, a multiple of TOKENS.

    The CTA keeps, for each expert, the position of the next choice.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    begin = tl.minimum(pid * share, tokens)
    end = tl.minimum(begin + share, tokens)
    expert = tl.arange(0, PAD)
    every, before = _before(
        counts_ptr, experts_ptr, begin * K, tokens * K, num_experts, PAD, COUNTED, COUNTS, HEAD
    )
    offsets = tl.cumsum(every, 0) - every
    if pid == 0:
        tl.store(offsets_ptr + expert, offsets, mask=expert < num_experts)
        tl.store(offsets_ptr + num_experts, tl.sum(every, 0))
    following = offsets + before
    for first in range(begin, end, TOKENS):
        at, live = _choices(first, TOKENS, K, K_PAD, end)
        mine = _experts(experts_ptr, at, live, num_experts)
        chosen = mine[:, None] == expert[None, :]
        place = tl.sum(tl.where(chosen, following[None, :], 0), 1)
        following += tl.sum(chosen.to(tl.int32), 0)
        other = _experts(experts_ptr, at, live, num_experts)[None, :]
        earlier = (other == mine[:, None]) & (at[None, :] < at[:, None])
        place += tl.sum(earlier.to(tl.int32), 1)
        place = tl.where(mine == NOWHERE, -1, place)
        tl.store(index_ptr + at, place, mask=live)
        _copy(
            x_ptr, rows_ptr, place, first, end, x_stride, rows_stride, hidden,
            TOKENS, K, K_PAD, BLOCK, UNIT,
        )  # fmt: skip
