"""Warp-specialised persistent GEMM of e4m3 for sm_90 (Gluon): one warp copies, one or two
warpgroups multiply, each 64 rows of a tile on its own, so that one multiplies while the other adds.

The schedule, the copying warp and the store are those of the bf16 kernel: a pair of e4m3 is copied
as 16 bits, and a step of BLOCK_K pairs is 128 products deep. Scales are of blocks (BLOCKS), or of
rows and then for the whole sum.
X is the operand on the matrix unit's row side: `a`, or `w` when SWAP.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smkern.kernels import gemm_tiles as _schedule
from smkern.kernels.fp8.gemm_sums import (
    QUARTER,
    ROWS,
    scales_ahead,
    shared_scales,
    sum_by_turns,
    sum_three,
    sum_wide,
)
from smkern.kernels.gemm_ws import _finish, store_partial
from smkern.kernels.gemm_ws_copy import barrier, copy_warp

_num_segments = gluon.jit(_schedule._num_segments)
_segment = gluon.jit(_schedule._segment)
_contributors = gluon.jit(_schedule._contributors)
_partial_slot = gluon.jit(_schedule._partial_slot)
_tile_coords = gluon.jit(_schedule._tile_coords)
_first_row = gluon.jit(_schedule._first_row)

BLOCK = gl.constexpr(128)
"""Rows of w that share a block's scale."""


@gluon.jit
def _row_scale(scale_ptr, first, step, limit, LENGTH: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of LENGTH rows, 1 past the end."""
    at = first + gl.arange(0, LENGTH, layout=LAYOUT)
    return gl.load(scale_ptr + at.to(gl.int64) * step, mask=at < limit, other=1.0)


@gluon.jit
def _scaled(
    total, a_scale, w_scale, a_first, w_first, a_step, w_step, m, n,
    X_ROWS: gl.constexpr, Y_ROWS: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """A sum times the scales of its rows of a and of w."""
    X: gl.constexpr = total.shape[0]
    Y: gl.constexpr = total.shape[1]
    if SWAP:
        by_x = _row_scale(w_scale, w_first, w_step, n * 8, X, X_ROWS)
        by_y = _row_scale(a_scale, a_first, a_step, m, Y, Y_ROWS)
    else:
        by_x = _row_scale(a_scale, a_first, a_step, m, X, X_ROWS)
        by_y = _row_scale(w_scale, w_first, w_step, n * 8, Y, Y_ROWS)
    return total * by_x[:, None] * by_y[None, :]


@gluon.jit
def _multiply(
    operands, schedule,
    PART: gl.constexpr, PARTS: gl.constexpr, ALONE: gl.constexpr, BLOCK_Y: gl.constexpr,
    SUMS: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, STREAM: gl.constexpr,
    SWAP: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
    MMA: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    TILE_Y: gl.constexpr = SUMS * BLOCK_Y
    BLOCK_X: gl.constexpr = PARTS * ROWS
    TILE: gl.constexpr = BLOCK_X * TILE_Y
    FIRST: gl.constexpr = PART * ROWS * TILE_Y
    X_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    Y_ROWS: gl.constexpr = gl.SliceLayout(0, MMA)
    (
        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
        counters, a_scale, w_scale, shared, m, n, out_stride, residual_stride, a_step, a_block_step,
        w_step,
    ) = operands  # fmt: skip
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group = schedule
    gdc_wait()
    pid = gl.program_id(0)
    ctas = gl.num_programs(0)
    streamed, segments = _num_segments(pid, ctas, whole_tiles, stream_iters, quantum, k_iters)
    stage = 0
    phase = 0
    for i in range(segments):
        tile, k_begin, k_end = _segment(
            i, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters
        )
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        if SWAP:
            row0 = tile_x * BLOCK_X + PART * ROWS
            col0 = _first_row(tile_y, TILE_Y, m)
            own = tile_y * TILE_Y
            a_first = col0
            w_first = row0
        else:
            row0 = _first_row(tile_x, BLOCK_X, m) + PART * ROWS
            col0 = tile_y * TILE_Y
            own = tile_x * BLOCK_X
            a_first = row0
            w_first = col0
        steps = k_end - k_begin
        a_at = a_scale
        w_at = w_scale
        next_at = w_scale
        in_fours = 0
        if BLOCKS:
            # what rows past the end are multiplied by is not stored
            from_here = a_scale + k_begin.to(gl.int64) * a_block_step
            if SWAP:
                a_at = scales_ahead(from_here, a_first, m - 1, a_step, BLOCK_Y)
            else:
                row = gl.minimum(a_first + gl.arange(0, ROWS, layout=X_ROWS), m - 1)
                a_at = from_here + row.to(gl.int64) * a_step
            # past the end of w the last block's serve
            block = gl.minimum(w_first, n * 8 - 1) // BLOCK
            w_at = w_scale + block.to(gl.int64) * w_step + k_begin
            apart = (a_scale.to(gl.int64) % 16 != 0) | (a_block_step != 1) | (a_step % 4 != 0)
            in_fours = (apart | (k_begin % 4 != 0)) == 0
            block = gl.minimum(w_first + BLOCK, n * 8 - 1) // BLOCK
            next_at = w_scale + block.to(gl.int64) * w_step + k_begin
        if SUMS == 3:
            middle = gl.minimum(w_first + QUARTER, n * 8 - 1) // BLOCK
            first, second, third, stage, phase = sum_three(
                x_bufs, y_bufs, full, empty, stage, phase, steps, a_at, w_at,
                w_scale + middle.to(gl.int64) * w_step + k_begin, next_at, a_block_step, PART,
                PARTS, STAGES, MMA,
            )  # fmt: skip
            sums = (first, second, third)
        elif SUMS == 4:
            first, second, third, fourth, stage, phase = sum_wide(
                x_bufs, y_bufs, full, empty, stage, phase, steps, a_at, w_at, next_at,
                a_block_step, PART, PARTS, STAGES, BLOCKS, MMA,
            )  # fmt: skip
            sums = (first, second, third, fourth)  # type: ignore[assignment]
        else:
            total, stage, phase = sum_by_turns(
                x_bufs, y_bufs, full, empty, stage, phase, steps, a_at, w_at, a_block_step,
                in_fours, shared.index(PART), PART, PARTS, ALONE, BLOCK_Y, STAGES, BLOCKS, SWAP,
                MMA,
            )  # fmt: skip
            if not BLOCKS:
                total = _scaled(
                    total, a_scale, w_scale, a_first, w_first, a_step, w_step, m, n, X_ROWS, Y_ROWS,
                    SWAP,
                )  # fmt: skip
            sums = (total,)  # type: ignore[assignment]
        nth = tile - whole_tiles
        head = pid
        pieces = 1
        complete = True
        if STREAM:  # noqa: SIM102 (this one is the compiler's, the next the kernel's)
            if steps < k_iters:
                head, pieces = _contributors(nth, quantum, k_iters)
                # of two CTAs the second need not write its partial if the first has written its own
                counter = counters + nth * PARTS + PART
                arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
                if (arrived == 0) | (pieces > 2):
                    slot = _partial_slot(pid, nth, quantum, k_iters)
                    for part in gl.static_range(SUMS):
                        at = FIRST + part * ROWS * BLOCK_Y
                        store_partial(partials, slot, sums[part], TILE, at)
                    barrier()
                    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                complete = arrived == pieces - 1
                if complete:
                    gl.store(counter, 0)
        if complete:
            for part in gl.static_range(SUMS):
                _finish(
                    sums[part], row0, col0 + part * BLOCK_Y, own, out_ptr, bias_ptr, residual_ptr,
                    m, n, out_stride, residual_stride, partials, pid, nth, head, pieces, quantum,
                    k_iters, TILE, FIRST + part * ROWS * BLOCK_Y, STREAM, BLOCK_Y, LAYOUT,
                    SWAP, BIAS, RESIDUAL, ACT,
                )  # fmt: skip


@gluon.jit
def fp8_gemm_ws(
    x_desc, y_desc, out_ptr, bias_ptr, residual_ptr, partials, counters, a_scale, w_scale,
    m, n, out_stride, residual_stride, a_step, a_block_step, w_step,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early,
    PARTS: gl.constexpr, ALONE: gl.constexpr, BLOCK_Y: gl.constexpr, SUMS: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, STREAM: gl.constexpr,
    SWAP: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
    MMA: gl.constexpr, LAYOUT: gl.constexpr, FLAT: gl.constexpr, REGS: gl.constexpr,
    COPY_REGS: gl.constexpr,
):  # fmt: skip
    """out [m, 8n] = act((x @ y^T) * scales + bias) + residual; n and strides in eights.

    A wide tile, of 192 or 256 columns with scales of blocks, has that many SUMS of 64.
    """
    BLOCK_X: gl.constexpr = PARTS * ROWS
    TILE_Y: gl.constexpr = SUMS * BLOCK_Y
    BOX_Y: gl.constexpr = y_desc.block_type.shape[0]
    BOXES: gl.constexpr = TILE_Y // BOX_Y
    FIRST_PART: gl.constexpr = 0
    SECOND_PART: gl.constexpr = 1
    x_boxes = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_X, BLOCK_K], x_desc.layout)
    y_boxes = gl.allocate_shared_memory(
        y_desc.dtype, [STAGES * BOXES, BOX_Y, BLOCK_K], y_desc.layout
    )
    x_bufs = x_boxes._reinterpret(gl.float8e4nv, [STAGES * PARTS, ROWS, 2 * BLOCK_K], FLAT)
    y_bufs = y_boxes._reinterpret(gl.float8e4nv, [STAGES * BOXES, BOX_Y, 2 * BLOCK_K], FLAT)
    shared = shared_scales(PARTS, BLOCK_Y, BLOCKS and SWAP)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    operands = (
        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
        counters, a_scale, w_scale, shared, m, n, out_stride, residual_stride, a_step, a_block_step,
        w_step,
    )  # fmt: skip
    schedule = (tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        operands, schedule, FIRST_PART, PARTS, ALONE, BLOCK_Y, SUMS, STAGES,
                        BLOCKS, STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    _multiply,
                    (
                        operands, schedule, SECOND_PART, PARTS, ALONE, BLOCK_Y, SUMS, STAGES,
                        BLOCKS, STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    copy_warp,
                    (
                        x_desc, y_desc, x_boxes, y_boxes, y_boxes, full, empty, m, tiles_x,
                        tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early, BLOCK_X,
                        TILE_Y, 0, BLOCK_K, STAGES, SWAP,
                    ),
                ),
            ],
            [4, 1],
            [REGS, COPY_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        operands, schedule, FIRST_PART, PARTS, ALONE, BLOCK_Y, SUMS, STAGES,
                        BLOCKS, STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    copy_warp,
                    (
                        x_desc, y_desc, x_boxes, y_boxes, y_boxes, full, empty, m, tiles_x,
                        tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early, BLOCK_X,
                        TILE_Y, 0, BLOCK_K, STAGES, SWAP,
                    ),
                ),
            ],
            [1],
            [COPY_REGS],
        )  # fmt: skip
