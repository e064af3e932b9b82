"""Persistent GEMM with SwiGLU in its epilogue in Triton: by tensor maps, or by pointers.

A tile's weight rows are half gate rows, half up rows (from t * B/2 and I + t * B/2 of w [2I, K]),
each half with its own accumulator. Schedule, operands and store are those of `gemm_triton`; these
kernels run in Triton's interpreter too.
"""

import triton
import triton.language as tl

from smkern.kernels.gemm_triton import (
    _activate,
    _contributors,
    _num_segments,
    _partial_slot,
    _segment,
    _store,
    _tile_coords,
)


@triton.jit
def _finish_pair(
    gate, up, tile, tile_x, tile_y, k_begin, k_end, out_ptr, bias_ptr, residual_ptr, partials,
    counters, m, n, out_stride, residual_stride, k_iters, whole_tiles, quantum,
    UNIT: tl.constexpr, STREAM: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Store a whole tile, or write both partials; the last CTA to arrive sums in index order."""
    X: tl.constexpr = gate.shape[0]
    Y: tl.constexpr = gate.shape[1]
    complete = True
    if STREAM and (k_end - k_begin < k_iters):
        nth = tile - whole_tiles
        first, pieces = _contributors(nth, quantum, k_iters)
        slot = _partial_slot(tl.program_id(0), nth, quantum, k_iters)
        offset = tl.arange(0, X)[:, None] * Y + tl.arange(0, Y)[None, :]
        base = partials + slot.to(tl.int64) * (2 * X * Y)
        tl.store(base + offset, gate)
        tl.store(base + X * Y + offset, up)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + nth, 1, sem="acq_rel", scope="gpu")
        complete = arrived == pieces - 1
        if complete:
            tl.store(counters + nth, 0)
            gate = tl.zeros([X, Y], tl.float32)
            up = tl.zeros([X, Y], tl.float32)
            for piece in range(pieces):
                slot = _partial_slot(first + piece, nth, quantum, k_iters)
                base = partials + slot.to(tl.int64) * (2 * X * Y)
                gate += tl.load(base + offset, cache_modifier=".cg")
                up += tl.load(base + X * Y + offset, cache_modifier=".cg")
    if complete:
        _store(
            _activate(gate, "silu") * up, tile_x * X + tl.arange(0, X),
            tile_y * Y + tl.arange(0, Y), out_ptr, bias_ptr, residual_ptr, m, n, out_stride,
            residual_stride, UNIT, SWAP, False, False, "none",
        )  # fmt: skip


@triton.jit
def gemm_glu_tma(
    x_desc, y_desc, out_ptr, bias_ptr, residual_ptr, partials, counters,
    m, n, out_stride, residual_stride,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, STREAM: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """out [m, n*UNIT] = silu(gate) * up, operands read through tensor maps."""
    X: tl.constexpr = BLOCK_X // 2 if SWAP else BLOCK_X
    Y: tl.constexpr = BLOCK_Y if SWAP else BLOCK_Y // 2
    pid = tl.program_id(0)
    ctas = tl.num_programs(0)
    streamed, segments = _num_segments(pid, ctas, whole_tiles, stream_iters, quantum, k_iters)
    for i in range(segments):
        tile, k_begin, k_end = _segment(
            i, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters
        )
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        gate = tl.zeros([X, Y], tl.float32)
        up = tl.zeros([X, Y], tl.float32)
        for k in tl.range(k_begin, k_end, num_stages=STAGES):
            x = x_desc.load([tile_x * X, k * BLOCK_K])
            y = y_desc.load([tile_y * Y, k * BLOCK_K])
            gate = tl.dot(x, y.T, gate)
            if SWAP:
                x = x_desc.load([n * UNIT + tile_x * X, k * BLOCK_K])
            else:
                y = y_desc.load([n * UNIT + tile_y * Y, k * BLOCK_K])
            up = tl.dot(x, y.T, up)
        _finish_pair(
            gate, up, tile, tile_x, tile_y, k_begin, k_end, out_ptr, bias_ptr, residual_ptr,
            partials, counters, m, n, out_stride, residual_stride, k_iters, whole_tiles, quantum,
            UNIT, STREAM, SWAP,
        )  # fmt: skip


@triton.jit
def gemm_glu_pointer(
    x_ptr, y_ptr, out_ptr, bias_ptr, residual_ptr, partials, counters,
    m, n, out_stride, residual_stride,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group,
    x_stride, y_stride, k,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, STREAM: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """The same through pointers; strides of x and y, n and k count UNIT elements."""
    X: tl.constexpr = BLOCK_X // 2 if SWAP else BLOCK_X
    Y: tl.constexpr = BLOCK_Y if SWAP else BLOCK_Y // 2
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
        gate = tl.zeros([X, Y], tl.float32)
        up = tl.zeros([X, Y], tl.float32)
        for step in tl.range(k_begin, k_end, num_stages=STAGES):
            at = step * BLOCK_K + k_offset
            inside = (at < k * UNIT)[None, :]
            x_mask = inside & (x_row < rows)[:, None]
            y_mask = inside & (y_row < cols)[:, None]
            x = tl.load(x_base + at[None, :], mask=x_mask, other=0.0)
            y = tl.load(y_base + at[None, :], mask=y_mask, other=0.0)
            gate = tl.dot(x, y.T, gate, input_precision="ieee")
            if SWAP:
                x = tl.load(x_base + to_up + at[None, :], mask=x_mask, other=0.0)
            else:
                y = tl.load(y_base + to_up + at[None, :], mask=y_mask, other=0.0)
            up = tl.dot(x, y.T, up, input_precision="ieee")
        _finish_pair(
            gate, up, tile, tile_x, tile_y, k_begin, k_end, out_ptr, bias_ptr, residual_ptr,
            partials, counters, m, n, out_stride, residual_stride, k_iters, whole_tiles, quantum,
            UNIT, STREAM, SWAP,
        )  # fmt: skip
