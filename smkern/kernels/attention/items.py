"""The plan of an attention step, in Python: the reference of `csrc/attention_plan.cu`.

A plan is an int32 buffer: a header, the decode items, the prefill items. An item is the work of one
CTA (or team of warps), for each KV head in turn: a block of packed rows of one request and a piece
of its keys. Packed row r of a request is query token r // group, head r % group of the KV head's
group. Kernels and the interpreter's tests read the same buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from smkern.tuning.attention.shapes import (
    DECODE_MAX_Q,
    MERGED_AT_ONCE,
    PIECE_COST,
    PREFILL_ROWS,
    PREFILL_TILE,
    AttentionShape,
    bundles_of,
    decode_cut,
    prefill_piece,
)

HEADER_WORDS = 64
(NUM_DECODE, NUM_PREFILL, DECODE_CTAS, OVERFLOW, DECODE_SLOTS, PREFILL_SLOTS, DECODE_COST,
 FIRST_COST) = range(8)  # fmt: skip
TICKET, DEPARTED = 8, 9
"""Number of header words. The last two are counters, zero between launches."""
ITEM_WORDS = 12
(REQUEST, KV_BEGIN, KV_END, KV_LEN, Q_START, Q_LEN, FIRST_ROW, FIRST_SLOT, NUM_PIECES, PIECE,
 COUNTER, TILES) = range(ITEM_WORDS)  # fmt: skip
COST = TILES
"""Words of an item. Keys [KV_BEGIN, KV_END) are walked for the packed rows from FIRST_ROW.

FIRST_SLOT: slot of the partial of the row block's piece 0 (-1: a single piece, written directly to
the output); those of its bundles, if it has any, follow its pieces'. COUNTER: its first counter
(times KV heads, plus the head, gives the arrival counter): of its pieces, or of its bundles, whose
own counters follow. TILES (prefill items): number of 128-key tiles, by which items
are sorted. COST (decode items): total cost of all earlier items, where an item costs its 128-key
tiles, one at least, plus PIECE_COST; teams share the total, DECODE_COST, evenly. FIRST_COST: cost
of the first item.
"""


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Offsets and sizes in a plan's buffers, in words; derived from host numbers only."""

    decode_at: int
    prefill_at: int
    words: int
    max_decode_items: int
    max_prefill_items: int
    decode_slots: int
    prefill_slots: int
    num_counters: int

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, shape: AttentionShape) -> PlanLayout:
        """The layout of a shape, cached: a step's plan, records and launches all use it."""
        decode, prefill = shape.max_decode_items, shape.max_prefill_items
        prefill_at = HEADER_WORDS + ITEM_WORDS * decode
        words = prefill_at + ITEM_WORDS * prefill
        # only requests with several pieces have slots: none if no request can have two pieces
        blocks = shape.batch * -(
            -min(shape.max_q_len, DECODE_MAX_Q) * shape.group // shape.decode_rows
        )
        decode_slots = decode if decode > blocks else 0
        # 17 pieces have 3 bundles, more pieces fewer each
        if decode_slots and decode_cut(shape.max_kv_len)[1] >= MERGED_AT_ONCE:
            decode_slots += decode * 3 // (MERGED_AT_ONCE + 1)
        prefill_slots = prefill if shape.cuts_prefill else 0
        # only row blocks with two or more pieces have one, and 17 with their bundles 4
        counters = (decode + prefill) // 2 + 1
        return cls(
            HEADER_WORDS, prefill_at, words, decode, prefill, decode_slots, prefill_slots, counters
        )


def visible(shape: AttentionShape, q_len: int, kv_len: int, tokens: range) -> tuple[int, int]:
    """Keys [begin, end) visible to some query token of `tokens` (tokens of one request)."""
    end = min(kv_len, max(kv_len - q_len + tokens[-1] + 1, 0)) if shape.causal else kv_len
    begin = 0
    if shape.window:
        begin = max(0, kv_len - q_len + tokens[0] - shape.window + 1)
    return min(begin, end), end


def plan_items(
    shape: AttentionShape,
    kv_lens: Sequence[int],
    cu_q_lens: Sequence[int] | None,
    num_ctas: int,
) -> np.ndarray:
    """The plan's buffer for these lengths, int32 [PlanLayout.of(shape).words].

    Lengths outside the shape are clamped: kv_len to [0, max_kv_len], query ranges to [0,
    max_tokens] and max_q_len. A decode request or a prefill row block is never planned in part: it
    is dropped, and its items are counted in OVERFLOW, once the items or slots of its path up to and
    including it, or the counters of both paths, exceed the layout's room. Dropped ones count
    towards these sums, so everything after them on the path is dropped too.
    A request with queries but no visible key has one item without keys, which writes zeros.
    """
    layout = PlanLayout.of(shape)
    buffer = np.zeros(layout.words, dtype=np.int32)
    decode: list[list[int]] = []
    prefill: list[list[int]] = []
    kept = {"decode": decode, "prefill": prefill}
    items = {"decode": 0, "prefill": 0}
    slots = {"decode": 0, "prefill": 0}
    most_items = {"decode": layout.max_decode_items, "prefill": layout.max_prefill_items}
    most_slots = {"decode": layout.decode_slots, "prefill": layout.prefill_slots}
    places = {"decode": 0, "prefill": 0, "counter": 0}
    counters = overflow = 0
    for request in range(shape.batch):
        kv_len = min(max(int(kv_lens[request]), 0), shape.max_kv_len)
        q_start, q_end = request, request + 1
        if cu_q_lens is not None:
            q_start = min(max(int(cu_q_lens[request]), 0), shape.max_tokens)
            q_end = min(max(int(cu_q_lens[request + 1]), q_start), shape.max_tokens)
        q_len = min(q_end - q_start, shape.max_q_len)
        if q_len == 0:
            continue
        is_decode = shape.decodes(q_len)
        rows = q_len * shape.group
        block = shape.decode_rows if is_decode else PREFILL_ROWS
        piece, last = decode_cut(kv_len)
        if not is_decode:
            piece = prefill_piece(q_len, kv_len, shape.group, shape.num_kv_heads)
        path = "decode" if is_decode else "prefill"
        for first_row in range(0, rows, block):
            last_row = min(first_row + block, rows) - 1
            tokens = range(first_row // shape.group, last_row // shape.group + 1)
            if is_decode:  # all row blocks of a request walk the same keys
                tokens = range(q_len)
            begin, end = visible(shape, q_len, kv_len, tokens)
            if not is_decode:
                last = max(begin, end - 1) // piece
            first = min(begin // piece, last)
            pieces = last - first + 1
            if first_row == 0 or not is_decode:  # a decode request's first block counts for all
                count = -(-rows // block) if is_decode else 1
                bundles = bundles_of(pieces) if is_decode else 0
                items[path] += count * pieces
                if pieces > 1:
                    slots[path] += count * (pieces + bundles)
                    counters += count * (1 + bundles)
                dropped = (
                    items[path] > most_items[path]
                    or slots[path] > most_slots[path]
                    or counters > layout.num_counters
                )
            if dropped:
                overflow += pieces
                continue
            first_slot, mine = (places[path], places["counter"]) if pieces > 1 else (-1, 0)
            if pieces > 1:
                places[path] += pieces + bundles
                places["counter"] += 1 + bundles
            for index in range(pieces):
                key0 = max(begin // PREFILL_TILE * PREFILL_TILE, (first + index) * piece)
                if is_decode:
                    key0 = (first + index) * piece
                key1 = (first + index + 1) * piece if index < pieces - 1 else end
                tiles = -(-max(key1 - key0, 0) // PREFILL_TILE)
                item = [request, key0, key1, kv_len, q_start, q_len, first_row, first_slot,
                        pieces, index, mine, tiles]  # fmt: skip
                kept[path].append(item)
    # longest first; among equals later rows first, which a stable sort keeps
    prefill.reverse()
    prefill.sort(key=lambda item: -item[TILES])
    buffer[[NUM_DECODE, NUM_PREFILL, DECODE_CTAS]] = (
        len(decode),
        len(prefill),
        decode_ctas(decode, prefill, num_ctas, shape),
    )
    buffer[[OVERFLOW, DECODE_SLOTS, PREFILL_SLOTS]] = overflow, slots["decode"], slots["prefill"]
    costs = [max(item[TILES], 1) + PIECE_COST for item in decode]
    for item, before in zip(decode, np.cumsum([0, *costs]), strict=False):
        item[COST] = int(before)
    buffer[[DECODE_COST, FIRST_COST]] = sum(costs), costs[0] if costs else 0
    if decode:
        buffer[layout.decode_at :][: len(decode) * ITEM_WORDS] = np.ravel(decode)
    if prefill:
        buffer[layout.prefill_at :][: len(prefill) * ITEM_WORDS] = np.ravel(prefill)
    return buffer


def decode_ctas(
    decode: Sequence[Sequence[int]],
    prefill: Sequence[Sequence[int]],
    num_ctas: int,
    shape: AttentionShape,
) -> int:
    """How many CTAs of a mixed launch begin with decode items.

    By decode's share of the time, where a 128-key tile of one KV head costs a prefill CTA 1.6 us
    and the same keys a decode CTA 0.5. No more than saturate memory, so that the others compute
    meanwhile, unless these have nothing to do: 38.5 if a request's end took no time and its row
    blocks read for themselves, 48 for pieces of 512 keys and up to 8 heads on a KV head. Those have
    0.97 of memory's rate on an H200, of fp8 0.92. At least one CTA if there is any decode.
    """
    cost = sum(item[TILES] + 1 for item in decode)
    decode_cost, prefill_cost = 3 * cost, 10 * sum(item[TILES] + 1 for item in prefill)
    if decode_cost == 0:
        return 0
    if prefill_cost == 0:
        return num_ctas
    share = -(-decode_cost * num_ctas // (decode_cost + prefill_cost))
    blocks = -(-shape.group // shape.decode_rows)
    enough = 77 * blocks * cost // (2 * max(cost - len(decode), 1))
    idle = num_ctas - len(prefill) * shape.num_kv_heads
    return min(max(min(share, enough), idle, 1), max(num_ctas - 1, 1))
