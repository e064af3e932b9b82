"""QK norm, RoPE and the write of K and V into their pages: one pass over rows, in Triton.

A row is one head of one token. Tiles of rows of K with V come first, then those of q; a CTA takes
every num_programs-th. A row is held as two halves whose elements turn together, so each element is
read and written by one thread, and q may be written where it was read.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_INT = tl.constexpr(2147483647)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _request_of(token, live, cu_ptr, batch, first_step):
    """The last request that begins at or before each token, by bisection."""
    request = tl.zeros_like(token)
    step = first_step
    while step > 0:
        probe = request + step
        inside = live & (probe < batch)
        start = tl.load(cu_ptr + probe, mask=inside, other=MAX_INT)
        request = tl.where(inside & (start <= token), probe, request)
        step = step // 2
    return request


@triton.jit
def _place(token, live, cu_ptr, lens_ptr, batch, first_step, RAGGED: tl.constexpr):
    """Each token's request, its position there, and whether it belongs to one."""
    if RAGGED:
        request = _request_of(token, live, cu_ptr, batch, first_step)
        start = tl.load(cu_ptr + request, mask=live, other=0)
        end = tl.load(cu_ptr + request + 1, mask=live, other=0)
        live = live & (token >= start) & (token < end)
    else:
        request = token
        end = token + 1
    kv_len = tl.maximum(tl.load(lens_ptr + request, mask=live, other=0), 0)
    return request, kv_len - end + token, live


@triton.jit
def _page(
    request, position, live, table_ptr, indptr_ptr, table_stride, table_len, num_pages,
    PAGE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """The page of each position, and whether there is one."""
    live = live & (position >= 0)
    entry = tl.where(live, position, 0) // PAGE
    if FLAT:
        begin = tl.load(indptr_ptr + request, mask=live, other=0)
        end = tl.load(indptr_ptr + request + 1, mask=live, other=0)
        at = begin.to(tl.int64) + entry
        live = live & (at < end) & (at >= 0) & (at < table_len)
    else:
        live = live & (entry < table_len)
        at = request.to(tl.int64) * table_stride + entry
    page = tl.load(table_ptr + at, mask=live, other=-1)
    return page, live & (page >= 0) & (page < num_pages)


@triton.jit
def _dims(H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr):
    """Dimensions of a head's two halves: those that turn together, then the rest in two parts."""
    j = tl.arange(0, PAD)
    if TURNED == 0 or TURNED == H:
        return j, j + H
    turns = j < TURNED
    return tl.where(turns, j, j + TURNED), tl.where(turns, j + TURNED, j + H)


@triton.jit
def _load(
    base_ptr, live, H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Both halves [rows, PAD] of the rows that begin at `base_ptr` [rows]."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAD)
        both = tl.load(
            base_ptr[:, None] + dim[None, :], mask=live[:, None] & (dim < 2 * H)[None, :], other=0.0
        )
        first, second = both.reshape(base_ptr.shape[0], PAD, 2).split()
    else:
        one, two = _dims(H, PAD, TURNED)
        mask = live[:, None] & (tl.arange(0, PAD) < H)[None, :]
        first = tl.load(base_ptr[:, None] + one[None, :], mask=mask, other=0.0)
        second = tl.load(base_ptr[:, None] + two[None, :], mask=mask, other=0.0)
    return first, second


@triton.jit
def _store(
    base_ptr, first, second, live, H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write what `_load` reads."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAD)
        both = tl.join(first, second).reshape(base_ptr.shape[0], 2 * PAD)
        tl.store(
            base_ptr[:, None] + dim[None, :], both, mask=live[:, None] & (dim < 2 * H)[None, :]
        )
    else:
        one, two = _dims(H, PAD, TURNED)
        mask = live[:, None] & (tl.arange(0, PAD) < H)[None, :]
        tl.store(base_ptr[:, None] + one[None, :], first, mask=mask)
        tl.store(base_ptr[:, None] + two[None, :], second, mask=mask)


@triton.jit
def _weights(
    ptr, H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both halves [PAD] of the norm's weights."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAD)
        both = tl.load(ptr + dim, mask=dim < 2 * H, other=0.0)
        first, second = both.reshape(PAD, 2).split()
    else:
        one, two = _dims(H, PAD, TURNED)
        mask = tl.arange(0, PAD) < H
        first = tl.load(ptr + one, mask=mask, other=0.0)
        second = tl.load(ptr + two, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _turn(
    first, second, live, token, position, norm_ptr, eps, table_ptr, positions_ptr, positions_step,
    table_stride, max_position, H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, T_UNIT: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of rows given as halves, in fp32."""
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if NORM:
        mean = tl.sum(first * first + second * second, 1) / (2 * H)
        scale = tl.rsqrt(mean + eps)[:, None]
        one, two = _weights(norm_ptr, H, PAD, TURNED, INTERLEAVED)
        first = first * scale * one[None, :]
        second = second * scale * two[None, :]
    if TURNED:
        if positions_step:
            position = tl.load(
                positions_ptr + token.to(tl.int64) * positions_step, mask=live, other=0
            )
        row = tl.minimum(tl.maximum(position, 0), max_position - 1).to(tl.int64)
        j = tl.arange(0, PAD)
        turns = (j < TURNED)[None, :]
        at = table_ptr + (row * table_stride * T_UNIT)[:, None] + j[None, :]
        cos = tl.load(at, mask=live[:, None] & turns, other=1.0).to(tl.float32)
        sin = tl.load(at + TURNED, mask=live[:, None] & turns, other=0.0).to(tl.float32)
        one = first * cos - second * sin
        two = second * cos + first * sin
        if TURNED == H:
            first, second = one, two
        else:
            first, second = tl.where(turns, one, first), tl.where(turns, two, second)
    return first, second


@triton.jit
def _e4m3_bits(x):
    """x [fp32] as the bits of the nearest e4m3, saturated; for devices that do not convert."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    is_nan = x != x
    size = tl.minimum(tl.where(is_nan, 0.0, tl.abs(x)), E4M3_MAX)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
    # below 2^-6 steps are 2^-9, which is the last place of 2^14
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _stored(x, inverse, FP8: tl.constexpr, cache_ptr):
    """x as the cache holds it: divided and saturated for fp8, else rounded."""
    if FP8 == 1:
        return (x.to(tl.float32) * inverse).to(tl.float8e4nv)  # cvt.rn.satfinite
    elif FP8 == 2:  # noqa: RET505  a branch of constants: both may not be compiled
        return _e4m3_bits(x.to(tl.float32) * inverse)
    else:
        return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def append_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, k_cache_ptr, v_cache_ptr, table_ptr, indptr_ptr, lens_ptr, cu_ptr,
    positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, k_scale_ptr, v_scale_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, k_page, k_slot,
    k_cache_head, v_page, v_slot, v_cache_head, table_stride, cos_sin_stride,
    tokens, batch, first_step, table_len, num_pages, max_position, positions_step, with_k_scale,
    with_v_scale, eps, k_scale, v_scale,
    ROWS: tl.constexpr, H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, FLAT: tl.constexpr, FP8: tl.constexpr,
    UNIT: tl.constexpr, T_UNIT: tl.constexpr,
):  # fmt: skip
    """Append `tokens`; strides of rows count UNIT elements, those of the cosines T_UNIT.

    H is half a head, PAD the next power of two, TURNED the pairs that turn.
    """
    k_inverse = 1.0
    v_inverse = 1.0
    if FP8:
        if with_k_scale:
            k_scale = tl.load(k_scale_ptr)
        if with_v_scale:
            v_scale = tl.load(v_scale_ptr)
        k_inverse = tl.div_rn(1.0, k_scale)
        v_inverse = tl.div_rn(1.0, v_scale)
    kv_tiles = tl.cdiv(tokens * KV_HEADS, ROWS)
    tiles = kv_tiles
    if Q_HEADS:
        tiles += tl.cdiv(tokens * Q_HEADS, ROWS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if tile < kv_tiles:
            row = tile * ROWS + tl.arange(0, ROWS)
            token = row // KV_HEADS
            head = (row % KV_HEADS).to(tl.int64)
            wide = token.to(tl.int64)
            inside = row < tokens * KV_HEADS
            # asked for before the search, whose loads wait for each other
            v_at = v_ptr + (wide * v_token + head * v_head) * UNIT
            v_first, v_second = _load(v_at, inside, H, PAD, TURNED, INTERLEAVED)
            k_at = k_ptr + (wide * k_token + head * k_head) * UNIT
            k_first, k_second = _load(k_at, inside, H, PAD, TURNED, INTERLEAVED)
            request, position, live = _place(
                token, inside, cu_ptr, lens_ptr, batch, first_step, RAGGED
            )
            page, live = _page(
                request, position, live, table_ptr, indptr_ptr, table_stride, table_len, num_pages,
                PAGE, FLAT,
            )  # fmt: skip
            slot = (tl.where(live, position, 0) % PAGE).to(tl.int64)
            page = tl.where(live, page, 0).to(tl.int64)
            if NORM or TURNED:
                k_first, k_second = _turn(
                    k_first, k_second, live, token, position, k_norm_ptr, eps, cos_sin_ptr,
                    positions_ptr, positions_step, cos_sin_stride, max_position,
                    H, PAD, TURNED, INTERLEAVED, NORM, T_UNIT,
                )  # fmt: skip
            v_at = v_cache_ptr + (page * v_page + slot * v_slot + head * v_cache_head) * UNIT
            _store(
                v_at, _stored(v_first, v_inverse, FP8, v_cache_ptr),
                _stored(v_second, v_inverse, FP8, v_cache_ptr), live, H, PAD, TURNED, INTERLEAVED,
            )  # fmt: skip
            k_at = k_cache_ptr + (page * k_page + slot * k_slot + head * k_cache_head) * UNIT
            _store(
                k_at, _stored(k_first, k_inverse, FP8, k_cache_ptr),
                _stored(k_second, k_inverse, FP8, k_cache_ptr), live, H, PAD, TURNED, INTERLEAVED,
            )  # fmt: skip
        else:
            if Q_HEADS:
                row = (tile - kv_tiles) * ROWS + tl.arange(0, ROWS)
                token = row // Q_HEADS
                head = (row % Q_HEADS).to(tl.int64)
                wide = token.to(tl.int64)
                inside = row < tokens * Q_HEADS
                q_at = q_ptr + (wide * q_token + head * q_head) * UNIT
                first, second = _load(q_at, inside, H, PAD, TURNED, INTERLEAVED)
                request, position, live = _place(
                    token, inside, cu_ptr, lens_ptr, batch, first_step, RAGGED
                )
                if NORM or TURNED:
                    first, second = _turn(
                        first, second, live, token, position, q_norm_ptr, eps, cos_sin_ptr,
                        positions_ptr, positions_step, cos_sin_stride, max_position,
                        H, PAD, TURNED, INTERLEAVED, NORM, T_UNIT,
                    )  # fmt: skip
                out_at = out_ptr + (wide * out_token + head * out_head) * UNIT
                kind = out_ptr.dtype.element_ty
                _store(out_at, first.to(kind), second.to(kind), live, H, PAD, TURNED, INTERLEAVED)
