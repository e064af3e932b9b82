"""Persistent GEMM in Triton, by tensor maps (sm_90 and later) or by pointers (sm_80, any stride).

The schedule is the same as `gemm_ws`'s; X is the operand on the matrix unit's row side: `a`, or
`w` when SWAP. SwiGLU: a tile's weight rows are half gate rows, half up rows (from t * B/2 and
I + t * B/2 of w [2I, K]), each half with its own accumulator. These kernels run in Triton's
interpreter too.
"""

import triton
import triton.language as tl

from smkern.kernels import gemm_tiles as _schedule

_num_segments = triton.jit(_schedule._num_segments)
_segment = triton.jit(_schedule._segment)
_contributors = triton.jit(_schedule._contributors)
_partial_slot = triton.jit(_schedule._partial_slot)
_tile_coords = triton.jit(_schedule._tile_coords)


@triton.jit
def _activate(value, ACT: tl.constexpr):
    if ACT == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif ACT == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit
def _store(
    value, x, y, out_ptr, bias_ptr, residual_ptr, m, n, out_stride, residual_stride,
    UNIT: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """Bias, activation, residual and the store of one fp32 tile at rows x and columns y.

    `n` and the strides count UNIT elements, which tells the compiler their alignment.
    """
    if SWAP:
        value = tl.trans(value)
        rows = y
        cols = x
    else:
        rows = x
        cols = y
    mask = (rows < m)[:, None] & (cols < n * UNIT)[None, :]
    out_offset = rows.to(tl.int64)[:, None] * (out_stride * UNIT) + cols.to(tl.int64)[None, :]
    if BIAS:
        value += tl.load(bias_ptr + cols, mask=cols < n * UNIT, other=0.0).to(tl.float32)[None, :]
    value = _activate(value, ACT)
    if RESIDUAL:
        offset = rows.to(tl.int64)[:, None] * (residual_stride * UNIT) + cols.to(tl.int64)[None, :]
        value += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_offset, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _glu(acc, up, ACT: tl.constexpr):
    if ACT == "swiglu":
        acc = _activate(acc, "silu") * up
    return acc


@triton.jit
def _finish(
    acc, up, tile, tile_x, tile_y, k_begin, k_end, out_ptr, bias_ptr, residual_ptr, partials,
    counters, m, n, out_stride, residual_stride, k_iters, whole_tiles, quantum,
    UNIT: tl.constexpr, STREAM: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Store a whole tile, or write a partial; the last CTA to arrive sums in index order."""
    X: tl.constexpr = acc.shape[0]
    Y: tl.constexpr = acc.shape[1]
    GLU: tl.constexpr = ACT == "swiglu"
    SLOT: tl.constexpr = 2 * X * Y if GLU else X * Y
    x = tile_x * X + tl.arange(0, X)
    y = tile_y * Y + tl.arange(0, Y)
    if STREAM and (k_end - k_begin < k_iters):
        pid = tl.program_id(0)
        nth = tile - whole_tiles
        first, pieces = _contributors(nth, quantum, k_iters)
        slot = _partial_slot(pid, nth, quantum, k_iters)
        offset = tl.arange(0, X)[:, None] * Y + tl.arange(0, Y)[None, :]
        base = partials + slot.to(tl.int64) * SLOT
        tl.store(base + offset, acc)
        if GLU:
            tl.store(base + X * Y + offset, up)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + nth, 1, sem="acq_rel", scope="gpu")
        if arrived == pieces - 1:
            tl.store(counters + nth, 0)
            total = tl.zeros([X, Y], tl.float32)
            total_up = tl.zeros([X, Y], tl.float32)
            for piece in range(pieces):
                slot = _partial_slot(first + piece, nth, quantum, k_iters)
                base = partials + slot.to(tl.int64) * SLOT
                total += tl.load(base + offset, cache_modifier=".cg")
                if GLU:
                    total_up += tl.load(base + X * Y + offset, cache_modifier=".cg")
            _store(
                _glu(total, total_up, ACT), x, y, out_ptr, bias_ptr, residual_ptr, m, n,
                out_stride, residual_stride, UNIT, SWAP, BIAS, RESIDUAL, ACT,
            )  # fmt: skip
    else:
        _store(
            _glu(acc, up, ACT), x, y, out_ptr, bias_ptr, residual_ptr, m, n, out_stride,
            residual_stride, UNIT, SWAP, BIAS, RESIDUAL, ACT,
        )  # fmt: skip


@triton.jit
def gemm_tma(
    x_desc, y_desc, out_ptr, bias_ptr, residual_ptr, partials, counters,
    m, n, out_stride, residual_stride,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, STREAM: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """out [m, n*UNIT] = act(x @ y^T + bias) + residual, operands read through tensor maps."""
    GLU: tl.constexpr = ACT == "swiglu"
    X: tl.constexpr = BLOCK_X // 2 if GLU and SWAP else BLOCK_X
    Y: tl.constexpr = BLOCK_Y // 2 if GLU and not SWAP else BLOCK_Y
    pid = tl.program_id(0)
    ctas = tl.num_programs(0)
    streamed, segments = _num_segments(pid, ctas, whole_tiles, stream_iters, quantum, k_iters)
    for i in range(segments):
        tile, k_begin, k_end = _segment(
            i, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters
        )
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        acc = tl.zeros([X, Y], tl.float32)
        up = tl.zeros([X, Y], tl.float32)
        for k in tl.range(k_begin, k_end, num_stages=STAGES):
            x = x_desc.load([tile_x * X, k * BLOCK_K])
            y = y_desc.load([tile_y * Y, k * BLOCK_K])
            acc = tl.dot(x, y.T, acc)
            if GLU:
                if SWAP:
                    x = x_desc.load([n * UNIT + tile_x * X, k * BLOCK_K])
                else:
                    y = y_desc.load([n * UNIT + tile_y * Y, k * BLOCK_K])
                up = tl.dot(x, y.T, up)
        _finish(
            acc, up, tile, tile_x, tile_y, k_begin, k_end, out_ptr, bias_ptr, residual_ptr,
            partials, counters, m, n, out_stride, residual_stride, k_iters, whole_tiles, quantum,
            UNIT, STREAM, SWAP, BIAS, RESIDUAL, ACT,
        )  # fmt: skip


@triton.jit
def gemm_pointer(
    x_ptr, y_ptr, out_ptr, bias_ptr, residual_ptr, partials, counters,
    m, n, out_stride, residual_stride,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group,
    x_stride, y_stride, k,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, STREAM: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """The same through pointers; strides of x and y, n and k count UNIT elements."""
    GLU: tl.constexpr = ACT == "swiglu"
    X: tl.constexpr = BLOCK_X // 2 if GLU and SWAP else BLOCK_X
    Y: tl.constexpr = BLOCK_Y // 2 if GLU and not SWAP else BLOCK_Y
    pid = tl.program_id(0)
    ctas = tl.num_programs(0)
    if SWAP:
        rows = n * UNIT
        cols = m
        w_stride = x_stride * UNIT
    else:
        rows = m
        cols = n * UNIT
        w_stride = y_stride * UNIT
    to_up = (n * UNIT).to(tl.int64) * w_stride
    k_offset = tl.arange(0, BLOCK_K)
    streamed, segments = _num_segments(pid, ctas, whole_tiles, stream_iters, quantum, k_iters)
    for i in range(segments):
        tile, k_begin, k_end = _segment(
            i, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters
        )
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        x_row = tile_x * X + tl.arange(0, X)
        y_row = tile_y * Y + tl.arange(0, Y)
        x_base = x_ptr + x_row.to(tl.int64)[:, None] * (x_stride * UNIT)
        y_base = y_ptr + y_row.to(tl.int64)[:, None] * (y_stride * UNIT)
        acc = tl.zeros([X, Y], tl.float32)
        up = tl.zeros([X, Y], tl.float32)
        for step in tl.range(k_begin, k_end, num_stages=STAGES):
            at = step * BLOCK_K + k_offset
            inside = (at < k * UNIT)[None, :]
            x_mask = inside & (x_row < rows)[:, None]
            y_mask = inside & (y_row < cols)[:, None]
            x = tl.load(x_base + at[None, :], mask=x_mask, other=0.0)
            y = tl.load(y_base + at[None, :], mask=y_mask, other=0.0)
            acc = tl.dot(x, y.T, acc, input_precision="ieee")
            if GLU:
                if SWAP:
                    x = tl.load(x_base + to_up + at[None, :], mask=x_mask, other=0.0)
                else:
                    y = tl.load(y_base + to_up + at[None, :], mask=y_mask, other=0.0)
                up = tl.dot(x, y.T, up, input_precision="ieee")
        _finish(
            acc, up, tile, tile_x, tile_y, k_begin, k_end, out_ptr, bias_ptr, residual_ptr,
            partials, counters, m, n, out_stride, residual_stride, k_iters, whole_tiles, quantum,
            UNIT, STREAM, SWAP, BIAS, RESIDUAL, ACT,
        )  # fmt: skip
