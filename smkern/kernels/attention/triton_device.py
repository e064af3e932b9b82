"""Paged attention in Triton: every option, any device from sm_80 on, and Triton's interpreter.

One launch of a persistent kernel walks the decode items of a plan, another the prefill items. A
unit is an item (or some of its rows) and a KV head. Pieces of a row block write partials; the last
to arrive merges them in index order, and no CTA waits for another. Maxima, sums and rescaling are
per row, so a row's bits do not depend on the other rows of its tile.
"""

import triton
import triton.language as tl

from smkern.kernels.attention import items as _items
from smkern.kernels.fp8 import rows_math as _math

_ITEM_WORDS = tl.constexpr(_items.ITEM_WORDS)
_REQUEST = tl.constexpr(_items.REQUEST)
_KV_BEGIN = tl.constexpr(_items.KV_BEGIN)
_KV_END = tl.constexpr(_items.KV_END)
_KV_LEN = tl.constexpr(_items.KV_LEN)
_Q_START = tl.constexpr(_items.Q_START)
_Q_LEN = tl.constexpr(_items.Q_LEN)
_FIRST_ROW = tl.constexpr(_items.FIRST_ROW)
_FIRST_SLOT = tl.constexpr(_items.FIRST_SLOT)
_NUM_PIECES = tl.constexpr(_items.NUM_PIECES)
_PIECE = tl.constexpr(_items.PIECE)
_COUNTER = tl.constexpr(_items.COUNTER)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LEAST_SCALE = tl.constexpr(1e-30)
_SHARED_BY = tl.constexpr(128)
"""Columns of a scale of output in e4m3."""

_magnitude = triton.jit(_math._magnitude)
_scale_of = triton.jit(_math._scale_of)
_inverse = triton.jit(_math._inverse)


@triton.jit
def _finite(top):
    """A maximum to subtract: 0 for a row that has seen no keys, as (-inf) - (-inf) is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _widen(x, dtype: tl.constexpr):
    """Cache tile in the queries' dtype; e4m3 comes as bytes where the device cannot convert it."""
    if x.dtype == tl.uint8:
        # fp16 has e4m3's layout with a longer exponent, whose bias is larger by 8
        bits = ((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((x & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    elif x.dtype == tl.float8e4nv:
        # exact. Triton 3.6 converts directly to bf16 if the first target of the process can: after
        # a kernel for sm_90 that fails on sm_89, and it saves no instructions
        x = x.to(tl.float16)
    return x.to(dtype)


@triton.jit
def _walk(
    acc, top, total, q, k_base, v_base, table, first_page, table_len, num_pages,
    begin, end, low, row_end, row_low, inner, factor,
    k_page, k_slot, v_page, v_slot,
    KEYS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [begin, end). `begin` is a multiple of KEYS.

    Scores times `factor` are in log2 units; `top` is the maximum before scaling. Keys outside [low,
    end) are read as zeros, so that nothing there, not even NaN, reaches a row.
    """
    dim = tl.arange(0, PAD)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        column = tl.minimum(tl.maximum(first_page + key // PAGE, 0), table_len - 1)
        page = tl.load(table + column)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
        k_at = k_base + (page * k_page + slot * k_slot)[:, None] * UNIT + dim[None, :]
        v_at = v_base + (page * v_page + slot * v_slot)[:, None] * UNIT + dim[None, :]
        if MASKED:
            inside = ((key >= low) & (key < end))[:, None] & (dim < DIM)[None, :]
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
        elif PAD != DIM:
            whole = (dim < DIM)[None, :] & (key >= 0)[:, None]
            k = tl.load(k_at, mask=whole, other=0.0)
            v = tl.load(v_at, mask=whole, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        score = tl.dot(q, tl.trans(_widen(k, q.dtype)), input_precision="ieee")
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)); inner holds the 2 log2(e) / cap
            score = 1.0 - 2.0 / (1.0 + tl.exp2(score * inner))
        if MASKED:
            visible = key[None, :] < row_end[:, None]
            if WINDOW:
                visible &= key[None, :] >= row_low[:, None]
            score = tl.where(visible, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        base = _finite(new) * factor
        p = tl.exp2(score * factor - base[:, None])
        decay = tl.exp2(top * factor - base)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(
            p.to(q.dtype), _widen(v, q.dtype), acc * decay[:, None], input_precision="ieee"
        )
        top = new
    return acc, top, total


@triton.jit
def _store_scaled(
    value, token, head, live, out_at, scale_ptr, scale_token, scale_block, DIM: tl.constexpr
):
    """Store rows in e4m3, and a scale for 128 columns: parts of a row, or two heads next to each
    other, which are rows next to each other."""
    ROWS: tl.constexpr = value.shape[0]
    PARTS: tl.constexpr = DIM // _SHARED_BY if DIM > _SHARED_BY else 1
    most = tl.max(_magnitude(tl.reshape(value, [ROWS, PARTS, DIM // PARTS])), 2)
    if DIM < _SHARED_BY:
        SHARE: tl.constexpr = _SHARED_BY // DIM
        both = tl.max(tl.reshape(most, [ROWS // SHARE, SHARE]), 1)
        most = tl.reshape(tl.broadcast_to(both[:, None], [ROWS // SHARE, SHARE]), [ROWS, PARTS])
    scale = _scale_of(most)
    wide = tl.broadcast_to(_inverse(scale)[:, :, None], [ROWS, PARTS, DIM // PARTS])
    q = (value * tl.reshape(wide, [ROWS, DIM])).to(tl.float8e4nv)
    tl.store(out_at, q, mask=live[:, None])
    block = (head * DIM // _SHARED_BY)[:, None] + tl.arange(0, PARTS)[None, :]
    at = scale_ptr + token.to(tl.int64)[:, None] * scale_token + block * scale_block
    tl.store(at, scale, mask=live[:, None])


@triton.jit
def _write(
    acc, top, total, token, head, live, out_ptr, lse_ptr, sinks_ptr, v_scale,
    out_token, out_head, q_heads, with_lse, scale_ptr, scale_token, scale_block,
    DIM: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr, SINKS: tl.constexpr,
    SCALED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Normalise and store rows; `top` in log2 units. A row without keys: zeros, lse -inf."""
    dim = tl.arange(0, PAD)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0) * _LOG2E
        new = tl.maximum(top, sink)
        base = _finite(new)
        decay = tl.exp2(top - base)
        total = total * decay + tl.exp2(sink - base)
        acc = acc * decay[:, None]
        top = new
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    value = acc * (tl.where(empty, 0.0, v_scale) / total)[:, None]
    token64 = token.to(tl.int64)
    at = (token64 * out_token + head.to(tl.int64) * out_head)[:, None] * UNIT + dim[None, :]
    if SCALED:
        _store_scaled(
            value.to(dtype).to(tl.float32), token, head, live, out_ptr + at, scale_ptr,
            scale_token, scale_block, DIM,
        )  # fmt: skip
    else:
        tl.store(out_ptr + at, value.to(dtype), mask=live[:, None] & (dim < DIM)[None, :])
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * _LN2)
    tl.store(lse_ptr + token64 * q_heads + head, lse, mask=live & (with_lse != 0))


@triton.jit
def _rows(packed, live, kv_head, q_start, q_len, num_tokens, GROUP: tl.constexpr):
    """Global token, query head and existence of packed rows of a request."""
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    live = live & (token < q_len) & (q_start + token < num_tokens)
    return q_start + token, head, live


@triton.jit
def _merge(
    partials, stats, first, pieces, kv_heads, row,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum, maximum (log2 units) and weight of rows `row` of a block, over its pieces in order.

    `first` is the index of piece 0's partial; the next piece's is `kv_heads` further on.
    """
    dim = tl.arange(0, PAD)
    inside = row < BLOCK
    maxima = tl.full([ROWS, CHUNK], float("-inf"), tl.float32)
    for begin in range(0, pieces, CHUNK):
        piece = begin + tl.arange(0, CHUNK)
        at = (first + piece * kv_heads).to(tl.int64)[None, :] * (2 * BLOCK) + 2 * row[:, None]
        mask = inside[:, None] & (piece < pieces)[None, :]
        found = tl.load(stats + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        maxima = tl.maximum(maxima, found)
    top = tl.max(maxima, 1)
    base = _finite(top)
    acc = tl.zeros([ROWS, PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for piece in tl.range(pieces, num_stages=STAGES):
        number = (first + piece * kv_heads).to(tl.int64)
        at = stats + number * (2 * BLOCK) + 2 * row
        maximum = tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        weight = tl.load(at + 1, mask=inside, other=0.0, cache_modifier=".cg")
        at = partials + number * (BLOCK * DIM) + row[:, None] * DIM + dim[None, :]
        part = tl.load(
            at, mask=inside[:, None] & (dim < DIM)[None, :], other=0.0, cache_modifier=".cg"
        )
        decay = tl.exp2(maximum - base)
        total += weight * decay
        acc += part * decay[:, None]
    return acc, top, total


@triton.jit
def attention_items(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, indptr_ptr, sinks_ptr, k_scale_ptr,
    v_scale_ptr, count_ptr, items_ptr, counters, partials, stats,
    q_token, q_head, out_token, out_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    table_stride, table_len, num_pages, num_tokens, kv_heads, window,
    with_lse, is_flat, with_k_scale, with_v_scale,
    scale, softcap, k_scale, v_scale, out_scale_ptr, scale_token, scale_block,
    PREFILL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    Q_UNIT: tl.constexpr, KV_UNIT: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Attention for the `count_ptr[0]` items at `items_ptr`, for every KV head.

    An item of BLOCK rows is walked in tiles of ROWS, each a unit of its own with its own arrival.
    Strides of q and out count Q_UNIT elements, those of the caches KV_UNIT, which tells the
    compiler their alignment. Decode units are distributed in contiguous equal shares, prefill units
    (longest first) round-robin.
    """
    pid = tl.program_id(0)
    ctas = tl.num_programs(0)
    SPLIT: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
    units = tl.load(count_ptr) * kv_heads * SPLIT
    if PREFILL:
        first_unit = pid
        last_unit = units
        step = ctas
    else:
        first_unit = (pid.to(tl.int64) * units // ctas).to(tl.int32)
        last_unit = ((pid + 1).to(tl.int64) * units // ctas).to(tl.int32)
        step = 1
    k_scale *= tl.load(k_scale_ptr, mask=with_k_scale != 0, other=1.0)
    v_scale *= tl.load(v_scale_ptr, mask=with_v_scale != 0, other=1.0)
    scale *= k_scale
    # the maximum is taken before scaling, so a negative scale would make it wrong: q takes the sign
    sign = tl.where(scale < 0.0, -1.0, 1.0)
    scale = tl.maximum(scale * sign, _LEAST_SCALE)
    if SOFTCAP:
        inner = scale * (2.0 * _LOG2E) / softcap
        factor = softcap * _LOG2E
    else:
        inner = scale
        factor = scale * _LOG2E
    dim = tl.arange(0, PAD)
    for unit in range(first_unit, last_unit, step):
        row = unit % SPLIT * ROWS + tl.arange(0, ROWS)
        kv_head = unit // SPLIT % kv_heads
        item = items_ptr + (unit // SPLIT // kv_heads) * _ITEM_WORDS
        request = tl.load(item + _REQUEST)
        kv_begin = tl.load(item + _KV_BEGIN)
        kv_end = tl.load(item + _KV_END)
        q_start = tl.load(item + _Q_START)
        q_len = tl.load(item + _Q_LEN)
        first_row = tl.load(item + _FIRST_ROW)
        # position of the request's first query token
        origin = tl.load(item + _KV_LEN) - q_len
        token, head, live = _rows(
            first_row + row, row < BLOCK, kv_head, q_start, q_len, num_tokens, GROUP
        )
        position = origin + token - q_start
        first = first_row + unit % SPLIT * ROWS
        first_token = first // GROUP
        last_token = tl.minimum((first + ROWS - 1) // GROUP, q_len - 1)
        some_keys = (table_len > 0) & (num_pages > 0) & (first_token < q_len)
        end = tl.where(some_keys, kv_end, 0)
        row_end = tl.zeros([ROWS], tl.int32) + end
        if CAUSAL:
            end = tl.maximum(tl.minimum(end, origin + last_token + 1), 0)
            row_end = tl.minimum(position + 1, end)
        begin = kv_begin
        low = kv_begin
        row_low = position - window + 1
        if WINDOW:
            low = tl.maximum(low, origin + first_token - window + 1)
            begin = tl.maximum(begin, low // KEYS * KEYS)

        q_at = (token.to(tl.int64) * q_token + head.to(tl.int64) * q_head) * Q_UNIT
        q = tl.load(
            q_ptr + q_at[:, None] + dim[None, :],
            mask=live[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        q = q * sign.to(q.dtype)
        k_base = k_ptr + kv_head.to(tl.int64) * k_head * KV_UNIT
        v_base = v_ptr + kv_head.to(tl.int64) * v_head * KV_UNIT
        table = table_ptr + request.to(tl.int64) * table_stride
        first_page = tl.load(indptr_ptr + request, mask=is_flat != 0, other=0)

        acc = tl.zeros([ROWS, PAD], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if PREFILL:
            # every row sees keys [whole_begin, whole_end): no mask
            whole_begin = begin
            whole_end = end
            if WINDOW:
                edge = tl.maximum(origin + last_token - window + 1, begin)
                whole_begin = tl.minimum((edge + KEYS - 1) // KEYS * KEYS, end)
                acc, top, total = _walk(
                    acc, top, total, q, k_base, v_base, table, first_page, table_len, num_pages,
                    begin, whole_begin, low, row_end, row_low, inner, factor,
                    k_page, k_slot, v_page, v_slot,
                    KEYS, DIM, PAD, PAGE, KV_UNIT, WINDOW, SOFTCAP, True, STAGES,
                )  # fmt: skip
            if CAUSAL:
                whole_end = tl.minimum(end, origin + first_token + 1)
            whole_end = tl.maximum(whole_end // KEYS * KEYS, whole_begin)
            acc, top, total = _walk(
                acc, top, total, q, k_base, v_base, table, first_page, table_len, num_pages,
                whole_begin, whole_end, low, row_end, row_low, inner, factor,
                k_page, k_slot, v_page, v_slot,
                KEYS, DIM, PAD, PAGE, KV_UNIT, WINDOW, SOFTCAP, False, STAGES,
            )  # fmt: skip
            begin = whole_end
        acc, top, total = _walk(
            acc, top, total, q, k_base, v_base, table, first_page, table_len, num_pages,
            begin, end, low, row_end, row_low, inner, factor,
            k_page, k_slot, v_page, v_slot,
            KEYS, DIM, PAD, PAGE, KV_UNIT, WINDOW, SOFTCAP, True, STAGES,
        )  # fmt: skip
        top = top * factor

        # loaded and computed again: kept during the walk, they would cost 40 registers
        first_row = tl.load(item + _FIRST_ROW, volatile=True)
        q_len = tl.load(item + _Q_LEN, volatile=True)
        token, head, live = _rows(
            first_row + row, row < BLOCK, kv_head, q_start, q_len, num_tokens, GROUP
        )
        pieces = tl.load(item + _NUM_PIECES)
        if pieces > 1:
            first_number = tl.load(item + _FIRST_SLOT) * kv_heads + kv_head
            number = (first_number + tl.load(item + _PIECE) * kv_heads).to(tl.int64)
            inside = row < BLOCK
            tl.store(
                partials + number * (BLOCK * DIM) + row[:, None] * DIM + dim[None, :],
                acc,
                mask=inside[:, None] & (dim < DIM)[None, :],
            )
            at = stats + number * (2 * BLOCK) + 2 * row
            tl.store(at, top, mask=inside)
            tl.store(at + 1, total, mask=inside)
            counter = counters + tl.load(item + _COUNTER) * kv_heads + kv_head
            tl.debug_barrier()
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == pieces * SPLIT - 1:
                tl.store(counter, 0)
                for first_some in range(0, BLOCK, MERGE_ROWS):
                    some = first_some + tl.arange(0, MERGE_ROWS)
                    sums, maxima, weights = _merge(
                        partials, stats, first_number, pieces, kv_heads, some,
                        BLOCK, MERGE_ROWS, DIM, PAD, CHUNK, MERGE_STAGES,
                    )  # fmt: skip
                    some_token, some_head, some_live = _rows(
                        first_row + some, some < BLOCK, kv_head, q_start, q_len, num_tokens, GROUP
                    )
                    _write(
                        sums, maxima, weights, some_token, some_head, some_live,
                        out_ptr, lse_ptr, sinks_ptr, v_scale, out_token, out_head,
                        kv_heads * GROUP, with_lse, out_scale_ptr, scale_token, scale_block,
                        DIM, PAD, Q_UNIT, SINKS, SCALED, q_ptr.dtype.element_ty,
                    )  # fmt: skip
        else:
            _write(
                acc, top, total, token, head, live, out_ptr, lse_ptr, sinks_ptr, v_scale,
                out_token, out_head, kv_heads * GROUP, with_lse,
                out_scale_ptr, scale_token, scale_block,
                DIM, PAD, Q_UNIT, SINKS, SCALED, q_ptr.dtype.element_ty,
            )  # fmt: skip
