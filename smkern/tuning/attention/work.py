"""The work of an attention step for given lengths: items, keys, bytes and FLOPs.

Cuts keys as `smkern.kernels.attention.items.plan_items` does, without making the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from smkern.tuning.attention.shapes import (
    PREFILL_ROWS,
    PREFILL_TILE,
    AttentionShape,
    bundles_of,
    decode_cut,
    prefill_piece,
)

Ints = np.ndarray


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step; items are per KV head, all else covers all heads.

    Args:
        decode_keys: keys of each decode item, in the plan's order.
        prefill_tiles: 128-key tiles of each prefill item, longest first.
        decode_slots: partials that decode leaves.
        prefill_slots: partials that prefill leaves.
        keys_seen: keys of all requests visible to some query, counted once each.
        pairs: visible (query token, key) pairs.
        tokens: query tokens.
    """

    decode_keys: Ints
    prefill_tiles: Ints
    decode_slots: int
    prefill_slots: int
    keys_seen: int
    pairs: int
    tokens: int

    def bytes_moved(self, shape: AttentionShape, cache_bytes: int) -> int:
        """Keys and values once, queries in and results out, the page table."""
        kv = 2 * self.keys_seen * shape.num_kv_heads * shape.head_dim * cache_bytes
        rows = 2 * 2 * self.tokens * shape.num_q_heads * shape.head_dim
        return kv + rows + 4 * (self.keys_seen // shape.page_size)

    def flops(self, shape: AttentionShape) -> int:
        """FLOPs of both products over visible pairs."""
        return 4 * self.pairs * shape.num_q_heads * shape.head_dim


def typical_lengths(
    shape: AttentionShape, kv_lens: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """(query lengths, KV lengths) at the upper bounds of the shape.

    As many requests as `max_tokens` allows have `max_q_len` query tokens, the others one; KV
    lengths are `max_kv_len`, or less to stay within `max_total_kv`. Too few `kv_lens` are repeated.
    """
    batch, longest = shape.batch, shape.max_q_len
    live = min(batch, shape.max_tokens)
    long = live if longest <= 1 else min(live, (shape.max_tokens - live) // (longest - 1))
    q_lens = [longest] * long + [1] * (live - long) + [0] * (batch - live)
    if 0 < long + (shape.max_tokens - live > 0) <= live and long < live:
        q_lens[long] += min(longest - 1, shape.max_tokens - live - long * (longest - 1))
    if kv_lens is not None and len(kv_lens):
        kv = [int(kv_lens[i % len(kv_lens)]) for i in range(batch)]
    else:
        kv = [min(shape.max_kv_len, -(-shape.max_total_kv // max(batch, 1)))] * batch
    return q_lens, [min(max(n, 0), shape.max_kv_len) for n in kv]


def count_work(shape: AttentionShape, q_lens: Sequence[int], kv_lens: Sequence[int]) -> StepWork:
    """The work for these lengths; a request without query tokens has none."""
    decode: list[Ints] = []
    prefill: list[Ints] = []
    slots = {True: 0, False: 0}
    seen = pairs = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        if q_len < 1:
            continue
        short = shape.decodes(q_len)
        items, cut, keys, visible = (_decode if short else _prefill)(shape, q_len, kv_len)
        (decode if short else prefill).append(items)
        slots[short] += cut
        seen += keys
        pairs += visible
    empty = np.zeros(0, dtype=np.int64)
    tiles = np.sort(np.concatenate([empty, *prefill]))[::-1]
    return StepWork(
        np.concatenate([empty, *decode]), tiles, slots[True], slots[False], seen, pairs, sum(q_lens)
    )


_Counted = tuple[Ints, int, int, int]
"""Sizes of the items, partials, keys seen, visible pairs."""


@lru_cache(maxsize=1024)
def _decode(shape: AttentionShape, q_len: int, kv_len: int) -> _Counted:
    """Counts of a decode request: all of its row blocks walk the same keys."""
    begin, end = _visible(shape, q_len, kv_len, np.array([0]), np.array([q_len - 1]))
    low, high = int(begin[0]), int(end[0])
    piece, last = decode_cut(kv_len)
    first = min(low // piece, last)
    pieces = last - first + 1
    blocks = -(-q_len * shape.group // shape.decode_rows)
    start = (first + np.arange(pieces)) * piece
    keys = np.append(start[1:], high) - start
    cut = blocks * (pieces + bundles_of(pieces)) if pieces > 1 else 0
    return np.tile(keys, blocks), cut, high - low, _pairs(shape, q_len, kv_len)


@lru_cache(maxsize=1024)
def _prefill(shape: AttentionShape, q_len: int, kv_len: int) -> _Counted:
    """Counts of a prefill request: each block of 128 packed rows walks the keys its tokens see."""
    rows = np.arange(0, q_len * shape.group, PREFILL_ROWS)
    last = np.minimum(rows + PREFILL_ROWS, q_len * shape.group) - 1
    begin, end = _visible(shape, q_len, kv_len, rows // shape.group, last // shape.group)
    piece = prefill_piece(q_len, kv_len, shape.group, shape.num_kv_heads)
    first = begin // piece
    pieces = np.maximum(begin, end - 1) // piece - first + 1
    tiles = []
    for index in range(int(pieces.max())):
        has = pieces > index
        start = np.maximum(begin // PREFILL_TILE * PREFILL_TILE, (first + index) * piece)[has]
        stop = np.minimum(end, (first + index + 1) * piece)[has]
        tiles.append(-(-np.maximum(stop - start, 0) // PREFILL_TILE))
    keys = int(end.max() - begin.min())
    cut = int(pieces[pieces > 1].sum())
    return np.concatenate(tiles), cut, keys, _pairs(shape, q_len, kv_len)


def _visible(
    shape: AttentionShape, q_len: int, kv_len: int, first: Ints, last: Ints
) -> tuple[Ints, Ints]:
    """Keys [begin, end) visible to any token in [first, last], for each such pair."""
    end = np.full_like(last, kv_len)
    if shape.causal:
        end = np.minimum(np.maximum(kv_len - q_len + last + 1, 0), kv_len)
    begin = np.zeros_like(end)
    if shape.window:
        begin = np.maximum(kv_len - q_len + first - shape.window + 1, 0)
    return np.minimum(begin, end), end


def _pairs(shape: AttentionShape, q_len: int, kv_len: int) -> int:
    tokens = np.arange(q_len)
    begin, end = _visible(shape, q_len, kv_len, tokens, tokens)
    return int((end - begin).sum())
