"""QK norm, RoPE and the write of K and V into their pages: one pass over tokens, in Triton.

An item is a few tokens with all their heads, so that a token's position, cosines and sines are
looked up once; a CTA takes every num_programs-th item. A head is held as two halves whose elements
rotate together, so that one thread reads and writes each element and q may be updated in place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_INT = tl.constexpr(2147483647)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _request_of(token, live, cu_ptr, batch, first_step):
    """For each token the last request that begins at or before it, by bisection."""
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
    entry = tl.maximum(position, 0) // PAGE
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
    """Dimensions of a head's two halves: the rotated pairs, then the rest in two parts."""
    j = tl.arange(0, PAD)
    if TURNED == 0 or TURNED == H:
        return j, j + H
    turns = j < TURNED
    return tl.where(turns, j, j + TURNED), tl.where(turns, j + TURNED, j + H)


@triton.jit
def _load(
    ptr, token_at, head_stride, chunk: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr,
    H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Both halves [tokens, COUNT, PAD] of a chunk of heads, the last head repeated as padding."""
    head = tl.minimum(chunk * COUNT + tl.arange(0, COUNT), HEADS - 1).to(tl.int64)
    at = (ptr + (token_at[:, None] + (head * head_stride)[None, :]) * UNIT)[:, :, None]
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAD)
        if H == PAD:
            both = tl.load(at + dim[None, None, :])
        else:
            both = tl.load(at + dim[None, None, :], mask=(dim < 2 * H)[None, None, :], other=0.0)
        first, second = both.reshape(token_at.shape[0], COUNT, PAD, 2).split()
    else:
        one, two = _dims(H, PAD, TURNED)
        if H == PAD:
            first = tl.load(at + one[None, None, :])
            second = tl.load(at + two[None, None, :])
        else:
            mask = (tl.arange(0, PAD) < H)[None, None, :]
            first = tl.load(at + one[None, None, :], mask=mask, other=0.0)
            second = tl.load(at + two[None, None, :], mask=mask, other=0.0)
    return first, second


@triton.jit
def _store(
    ptr, token_at, head_stride, first, second, live, chunk: tl.constexpr, COUNT: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write both halves, laid out as in `_load`, for live tokens."""
    head = chunk * COUNT + tl.arange(0, COUNT)
    mask = live[:, None, None]
    if HEADS % COUNT != 0:
        mask = mask & (head < HEADS)[None, :, None]
    at = ptr + (token_at[:, None] + (head.to(tl.int64) * head_stride)[None, :]) * UNIT
    at = at[:, :, None]
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAD)
        if H != PAD:
            mask = mask & (dim < 2 * H)[None, None, :]
        both = tl.join(first, second).reshape(token_at.shape[0], COUNT, 2 * PAD)
        tl.store(at + dim[None, None, :], both, mask=mask)
    else:
        one, two = _dims(H, PAD, TURNED)
        if H != PAD:
            mask = mask & (tl.arange(0, PAD) < H)[None, None, :]
        tl.store(at + one[None, None, :], first, mask=mask)
        tl.store(at + two[None, None, :], second, mask=mask)


@triton.jit
def _weights(
    ptr, H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both halves [1, 1, PAD] of the norm's weights."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAD)
        both = tl.load(ptr + dim, mask=dim < 2 * H, other=0.0)
        first, second = both.reshape(PAD, 2).split()
    else:
        one, two = _dims(H, PAD, TURNED)
        mask = tl.arange(0, PAD) < H
        first = tl.load(ptr + one, mask=mask, other=0.0)
        second = tl.load(ptr + two, mask=mask, other=0.0)
    return first.to(tl.float32)[None, None, :], second.to(tl.float32)[None, None, :]


@triton.jit
def _angles(
    token, position, live, table_ptr, positions_ptr, positions_step, table_stride, max_position,
    H: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, T_UNIT: tl.constexpr,
):  # fmt: skip
    """Cosines and sines [tokens, 1, PAD] of each token's pairs."""
    if positions_step:
        position = tl.load(positions_ptr + token.to(tl.int64) * positions_step, mask=live, other=0)
    row = tl.minimum(tl.maximum(position, 0), max_position - 1).to(tl.int64)
    j = tl.arange(0, PAD)
    at = table_ptr + (row * table_stride * T_UNIT)[:, None] + j[None, :]
    if TURNED == PAD:
        cos = tl.load(at)
        sin = tl.load(at + TURNED)
    else:
        cos = tl.load(at, mask=(j < TURNED)[None, :], other=1.0)
        sin = tl.load(at + TURNED, mask=(j < TURNED)[None, :], other=0.0)
    return cos.to(tl.float32)[:, None, :], sin.to(tl.float32)[:, None, :]


@triton.jit
def _turn(
    first, second, norm_ptr, eps, cos, sin, H: tl.constexpr, PAD: tl.constexpr,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of heads given as halves, in fp32."""
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    # fma is explicit: which products the compiler fuses could differ between CTA sizes
    if NORM:
        total = tl.sum(tl.fma(first, first, second * second), 2)
        scale = tl.rsqrt(tl.fma(total, 0.5 / H, eps))[:, :, None]
        one, two = _weights(norm_ptr, H, PAD, TURNED, INTERLEAVED)
        if TURNED == H:
            # weights times angles: once per token, for all of its heads
            turned = tl.fma(first, one * cos, -(second * (two * sin))) * scale
            second = tl.fma(second, two * cos, first * (one * sin)) * scale
            first = turned
        else:
            first = first * one * scale
            second = second * two * scale
    if TURNED and not (NORM and TURNED == H):
        one = tl.fma(first, cos, -(second * sin))
        two = tl.fma(second, cos, first * sin)
        if TURNED == H:
            first, second = one, two
        else:
            turns = (tl.arange(0, PAD) < TURNED)[None, None, :]
            first, second = tl.where(turns, one, first), tl.where(turns, two, second)
    return first, second


@triton.jit
def _e4m3_bits(x):
    """x [fp32] as bits of the nearest e4m3, saturated; for devices without the instruction."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    is_nan = x != x
    size = tl.minimum(tl.where(is_nan, 0.0, tl.abs(x)), E4M3_MAX)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
    # below 2^-6 the spacing is 2^-9, the last place of 2^14
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _stored(x, inverse, FP8: tl.constexpr, cache_ptr):
    """x as stored in the cache: divided by the scale and saturated for fp8, else rounded."""
    if FP8 == 1:
        return (x.to(tl.float32) * inverse).to(tl.float8e4nv)  # cvt.rn.satfinite
    elif FP8 == 2:  # noqa: RET505  constant branches: only one may be compiled
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
    TOKENS: tl.constexpr, Q_COUNT: tl.constexpr, KV_COUNT: tl.constexpr, H: tl.constexpr,
    PAD: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, RAGGED: tl.constexpr,
    FLAT: tl.constexpr, FP8: tl.constexpr, UNIT: tl.constexpr, T_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Append `tokens`, TOKENS per item; row strides count UNIT elements, those of cosines T_UNIT.

    Heads are processed Q_COUNT and KV_COUNT at a time. H is half a head, PAD the next power of two,
    TURNED the number of rotated pairs.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    k_inverse = 1.0
    v_inverse = 1.0
    if FP8:
        if with_k_scale:
            k_scale = tl.load(k_scale_ptr)
        if with_v_scale:
            v_scale = tl.load(v_scale_ptr)
        k_inverse = tl.div_rn(1.0, k_scale)
        v_inverse = tl.div_rn(1.0, v_scale)
    for item in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = item * TOKENS + tl.arange(0, TOKENS)
        inside = token < tokens
        token = tl.minimum(token, tokens - 1)
        wide = token.to(tl.int64)
        # loaded before the search, whose loads depend on each other
        v_first, v_second = _load(
            v_ptr, wide * v_token, v_head, 0, KV_COUNT, KV_HEADS, H, PAD, TURNED, INTERLEAVED, UNIT
        )
        k_first, k_second = _load(
            k_ptr, wide * k_token, k_head, 0, KV_COUNT, KV_HEADS, H, PAD, TURNED, INTERLEAVED, UNIT
        )
        if Q_HEADS:
            q_first, q_second = _load(
                q_ptr, wide * q_token, q_head, 0, Q_COUNT, Q_HEADS, H, PAD, TURNED, INTERLEAVED,
                UNIT,
            )  # fmt: skip
        request, position, live = _place(token, inside, cu_ptr, lens_ptr, batch, first_step, RAGGED)
        page, stored = _page(
            request, position, live, table_ptr, indptr_ptr, table_stride, table_len, num_pages,
            PAGE, FLAT,
        )  # fmt: skip
        # arbitrary for tokens not stored: Triton 3.6 compiles a select here for few tokens only
        slot = (tl.maximum(position, 0) % PAGE).to(tl.int64)
        page = page.to(tl.int64)
        k_at = page * k_page + slot * k_slot
        v_at = page * v_page + slot * v_slot
        cos = 1.0
        sin = 0.0
        if TURNED:
            cos, sin = _angles(
                token, position, live, cos_sin_ptr, positions_ptr, positions_step, cos_sin_stride,
                max_position, H, PAD, TURNED, T_UNIT,
            )  # fmt: skip
        for chunk in tl.static_range((KV_HEADS + KV_COUNT - 1) // KV_COUNT):
            if chunk > 0:
                v_first, v_second = _load(
                    v_ptr, wide * v_token, v_head, chunk, KV_COUNT, KV_HEADS, H, PAD, TURNED,
                    INTERLEAVED, UNIT,
                )  # fmt: skip
                k_first, k_second = _load(
                    k_ptr, wide * k_token, k_head, chunk, KV_COUNT, KV_HEADS, H, PAD, TURNED,
                    INTERLEAVED, UNIT,
                )  # fmt: skip
            _store(
                v_cache_ptr, v_at, v_cache_head, _stored(v_first, v_inverse, FP8, v_cache_ptr),
                _stored(v_second, v_inverse, FP8, v_cache_ptr), stored, chunk, KV_COUNT, KV_HEADS,
                H, PAD, TURNED, INTERLEAVED, UNIT,
            )  # fmt: skip
            if NORM or TURNED:
                k_first, k_second = _turn(
                    k_first, k_second, k_norm_ptr, eps, cos, sin, H, PAD, TURNED, INTERLEAVED, NORM
                )
            _store(
                k_cache_ptr, k_at, k_cache_head, _stored(k_first, k_inverse, FP8, k_cache_ptr),
                _stored(k_second, k_inverse, FP8, k_cache_ptr), stored, chunk, KV_COUNT, KV_HEADS,
                H, PAD, TURNED, INTERLEAVED, UNIT,
            )  # fmt: skip
        if Q_HEADS:
            for chunk in tl.static_range((Q_HEADS + Q_COUNT - 1) // Q_COUNT):
                if chunk > 0:
                    q_first, q_second = _load(
                        q_ptr, wide * q_token, q_head, chunk, Q_COUNT, Q_HEADS, H, PAD, TURNED,
                        INTERLEAVED, UNIT,
                    )  # fmt: skip
                if NORM or TURNED:
                    first, second = _turn(
                        q_first, q_second, q_norm_ptr, eps, cos, sin, H, PAD, TURNED, INTERLEAVED,
                        NORM,
                    )  # fmt: skip
                else:
                    first, second = q_first, q_second
                kind = out_ptr.dtype.element_ty
                _store(
                    out_ptr, wide * out_token, out_head, first.to(kind), second.to(kind), live,
                    chunk, Q_COUNT, Q_HEADS, H, PAD, TURNED, INTERLEAVED, UNIT,
                )  # fmt: skip
