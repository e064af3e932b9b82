"""Warp-specialised persistent GEMM of e4m3 for sm_90 (Gluon): one warp copies, one or two
warpgroups multiply, each 64 rows of a tile on its own, so that one multiplies while the other adds.

The schedule, the copying warp and the store are those of the bf16 kernel: a pair of e4m3 is copied
as 16 bits, and a step of BLOCK_K pairs is 128 products deep. Tensor cores add e4m3 products with
about 14 bits, so their sums go to fp32 registers (`total`): with BLOCKS after every step, times the
scales of its blocks; otherwise after PROMOTE steps, and the rows' scales are for the whole sum.
X is the operand on the matrix unit's row side: `a`, or `w` when SWAP.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smkern.kernels import gemm_tiles as _schedule
from smkern.kernels.gemm_ws import _finish, _partial
from smkern.kernels.gemm_ws_copy import copy_warp

_num_segments = gluon.jit(_schedule._num_segments)
_segment = gluon.jit(_schedule._segment)
_contributors = gluon.jit(_schedule._contributors)
_partial_slot = gluon.jit(_schedule._partial_slot)
_tile_coords = gluon.jit(_schedule._tile_coords)
_first_row = gluon.jit(_schedule._first_row)

ROWS = gl.constexpr(64)
"""Rows of a tile that a warpgroup multiplies."""
BLOCK = gl.constexpr(128)
"""Rows of w that share a block's scale."""


@gluon.jit
def _row_scale(scale_ptr, first, step, limit, LENGTH: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of LENGTH rows, 1 past the end."""
    at = first + gl.arange(0, LENGTH, layout=LAYOUT)
    return gl.load(scale_ptr + at.to(gl.int64) * step, mask=at < limit, other=1.0)


@gluon.jit
def _multiply(
    x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials, counters,
    a_scale, w_scale, m, n, out_stride, residual_stride, a_step, a_block_step, w_step,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group,
    PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_Y: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, PROMOTE: gl.constexpr, PART_Y: gl.constexpr, STREAM: gl.constexpr,
    SWAP: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
    MMA: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = PARTS * ROWS * BLOCK_Y
    X_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    Y_ROWS: gl.constexpr = gl.SliceLayout(0, MMA)
    A_ROWS: gl.constexpr = Y_ROWS if SWAP else X_ROWS
    A_LENGTH: gl.constexpr = BLOCK_Y if SWAP else ROWS
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
            row0 = tile_x * (PARTS * ROWS) + PART * ROWS
            col0 = _first_row(tile_y, BLOCK_Y, m)
            own = tile_y * BLOCK_Y
            a_first = col0
            w_first = row0
        else:
            row0 = _first_row(tile_x, PARTS * ROWS, m) + PART * ROWS
            col0 = tile_y * BLOCK_Y
            own = tile_x * (PARTS * ROWS)
            a_first = row0
            w_first = col0
        acc = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
        total = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
        if BLOCKS:
            # a step's scales are fetched a step ahead; past the end of w the last block's serve
            block = gl.minimum(w_first, n * 8 - 1) // BLOCK
            w_at = w_scale + block.to(gl.int64) * w_step
            a_at = a_scale + k_begin.to(gl.int64) * a_block_step
            by_row = _row_scale(a_at, a_first, a_step, m, A_LENGTH, A_ROWS)
            by_block = gl.load(w_at + k_begin)
        for k in range(k_begin, k_end):
            mbarrier.wait(full.index(stage), phase)
            x = x_bufs.index(stage * PARTS + PART)
            y = y_bufs.index(stage).permute((1, 0))
            if BLOCKS:
                acc = warpgroup_mma(x, y, acc, use_acc=False, is_async=True)
                ahead = gl.minimum(k + 1, k_end - 1)
                a_at = a_scale + ahead.to(gl.int64) * a_block_step
                coming = _row_scale(a_at, a_first, a_step, m, A_LENGTH, A_ROWS)
                coming_block = gl.load(w_at + ahead)
            else:
                done = (k - k_begin) % PROMOTE
                acc = warpgroup_mma(x, y, acc, use_acc=done != 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index(stage), count=1)
            if BLOCKS:
                scale = by_row * by_block
                if SWAP:
                    total += acc * scale[None, :]
                else:
                    total += acc * scale[:, None]
                by_row = coming
                by_block = coming_block
            else:
                if (done == PROMOTE - 1) | (k == k_end - 1):
                    total += acc
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if not BLOCKS:
            a_rows = _row_scale(a_scale, a_first, a_step, m, A_LENGTH, A_ROWS)
            if SWAP:
                w_rows = _row_scale(w_scale, w_first, w_step, n * 8, ROWS, X_ROWS)
                total = total * w_rows[:, None] * a_rows[None, :]
            else:
                w_rows = _row_scale(w_scale, w_first, w_step, n * 8, BLOCK_Y, Y_ROWS)
                total = total * a_rows[:, None] * w_rows[None, :]

        nth = tile - whole_tiles
        first = pid
        pieces = 1
        complete = True
        FIRST: gl.constexpr = PART * ROWS * BLOCK_Y
        if STREAM:  # noqa: SIM102 (this one is the compiler's, the next the kernel's)
            if k_end - k_begin < k_iters:
                first, pieces = _contributors(nth, quantum, k_iters)
                # of two CTAs the second need not write its partial if the first has written its own
                counter = counters + nth * PARTS + PART
                arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
                if (arrived == 0) | (pieces > 2):
                    slot = _partial_slot(pid, nth, quantum, k_iters)
                    gl.store(_partial(partials, slot, total, TILE, FIRST, BLOCK_Y), total)
                    gl.thread_barrier()
                    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                complete = arrived == pieces - 1
                if complete:
                    gl.store(counter, 0)
        if complete:
            _finish(
                total, row0, col0, own, out_ptr, bias_ptr, residual_ptr, m, n, out_stride,
                residual_stride, partials, pid, nth, first, pieces, quantum, k_iters,
                TILE, FIRST, BLOCK_Y, STREAM, PART_Y, LAYOUT, SWAP, BIAS, RESIDUAL, ACT,
            )  # fmt: skip


@gluon.jit
def _copy_parts(
    x_desc, y_desc, x_bufs, y_bufs, full, empty, m,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early,
    PARTS: gl.constexpr, BLOCK_Y: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`copy_warp` for a number of parts that is no power of two: a box of rows for each."""
    BYTES: gl.constexpr = 2 * BLOCK_K * (PARTS * ROWS + BLOCK_Y)
    pid = gl.program_id(0)
    ctas = gl.num_programs(0)
    streamed, segments = _num_segments(pid, ctas, whole_tiles, stream_iters, quantum, k_iters)
    if (early > 0) & (segments > 0):
        tile, k_begin, k_end = _segment(
            0, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters
        )
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        early = gl.minimum(early, k_end - k_begin)
        for ahead in range(early):
            bar = full.index(ahead)
            mbarrier.expect(bar, BYTES)
            column = (k_begin + ahead) * BLOCK_K
            at = [tile_y * BLOCK_Y, column]
            tma.async_copy_global_to_shared(y_desc, at, bar, y_bufs.index(ahead))
    gdc_wait()
    stage = 0
    phase = 1
    for i in range(segments):
        tile, k_begin, k_end = _segment(
            i, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters
        )
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        row = _first_row(tile_x, PARTS * ROWS, m)
        for k in range(k_begin, k_end):
            bar = full.index(stage)
            if early > 0:
                early -= 1
            else:
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, BYTES)
                at = [tile_y * BLOCK_Y, k * BLOCK_K]
                tma.async_copy_global_to_shared(y_desc, at, bar, y_bufs.index(stage))
            for part in gl.static_range(PARTS):
                at = [row + part * ROWS, k * BLOCK_K]
                buffer = x_bufs.index(stage * PARTS + part)
                tma.async_copy_global_to_shared(x_desc, at, bar, buffer)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def fp8_gemm_ws(
    x_desc, y_desc, out_ptr, bias_ptr, residual_ptr, partials, counters, a_scale, w_scale,
    m, n, out_stride, residual_stride, a_step, a_block_step, w_step,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early,
    PARTS: gl.constexpr, BLOCK_Y: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, PROMOTE: gl.constexpr, PART_Y: gl.constexpr, STREAM: gl.constexpr,
    SWAP: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
    MMA: gl.constexpr, LAYOUT: gl.constexpr, FLAT: gl.constexpr, REGS: gl.constexpr,
    COPY_REGS: gl.constexpr,
):  # fmt: skip
    """out [m, 8n] = act((x @ y^T) * scales + bias) + residual; n and strides in eights."""
    BLOCK_X: gl.constexpr = PARTS * ROWS
    FIRST_PART: gl.constexpr = 0
    SECOND_PART: gl.constexpr = 1
    THIRD_PART: gl.constexpr = 2
    BOXES: gl.constexpr = BLOCK_X // x_desc.block_type.shape[0]
    x_boxes = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * BOXES, BLOCK_X // BOXES, BLOCK_K], x_desc.layout
    )
    y_boxes = gl.allocate_shared_memory(y_desc.dtype, [STAGES, BLOCK_Y, BLOCK_K], y_desc.layout)
    x_bufs = x_boxes._reinterpret(gl.float8e4nv, [STAGES * PARTS, ROWS, 2 * BLOCK_K], FLAT)
    y_bufs = y_boxes._reinterpret(gl.float8e4nv, [STAGES, BLOCK_Y, 2 * BLOCK_K], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    if PARTS == 3:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
                        counters, a_scale, w_scale, m, n, out_stride, residual_stride, a_step,
                        a_block_step, w_step, tiles_x, tiles_y, k_iters, whole_tiles, stream_iters,
                        quantum, group, FIRST_PART, PARTS, BLOCK_Y, STAGES, BLOCKS, PROMOTE, PART_Y,
                        STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    _multiply,
                    (
                        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
                        counters, a_scale, w_scale, m, n, out_stride, residual_stride, a_step,
                        a_block_step, w_step, tiles_x, tiles_y, k_iters, whole_tiles, stream_iters,
                        quantum, group, SECOND_PART, PARTS, BLOCK_Y, STAGES, BLOCKS, PROMOTE,
                        PART_Y, STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    _multiply,
                    (
                        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
                        counters, a_scale, w_scale, m, n, out_stride, residual_stride, a_step,
                        a_block_step, w_step, tiles_x, tiles_y, k_iters, whole_tiles, stream_iters,
                        quantum, group, THIRD_PART, PARTS, BLOCK_Y, STAGES, BLOCKS, PROMOTE,
                        PART_Y, STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    _copy_parts,
                    (
                        x_desc, y_desc, x_boxes, y_boxes, full, empty, m, tiles_x, tiles_y, k_iters,
                        whole_tiles, stream_iters, quantum, group, early, PARTS, BLOCK_Y, BLOCK_K,
                        STAGES,
                    ),
                ),
            ],
            [4, 4, 1],
            [REGS, REGS, COPY_REGS],
        )  # fmt: skip
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
                        counters, a_scale, w_scale, m, n, out_stride, residual_stride, a_step,
                        a_block_step, w_step, tiles_x, tiles_y, k_iters, whole_tiles, stream_iters,
                        quantum, group, FIRST_PART, PARTS, BLOCK_Y, STAGES, BLOCKS, PROMOTE, PART_Y,
                        STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    _multiply,
                    (
                        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
                        counters, a_scale, w_scale, m, n, out_stride, residual_stride, a_step,
                        a_block_step, w_step, tiles_x, tiles_y, k_iters, whole_tiles, stream_iters,
                        quantum, group, SECOND_PART, PARTS, BLOCK_Y, STAGES, BLOCKS, PROMOTE,
                        PART_Y, STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    copy_warp,
                    (
                        x_desc, y_desc, x_boxes, y_boxes, y_boxes, full, empty, m, tiles_x, tiles_y,
                        k_iters, whole_tiles, stream_iters, quantum, group, early, BLOCK_X, BLOCK_Y,
                        0, BLOCK_K, STAGES, SWAP,
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
                        x_bufs, y_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials,
                        counters, a_scale, w_scale, m, n, out_stride, residual_stride, a_step,
                        a_block_step, w_step, tiles_x, tiles_y, k_iters, whole_tiles, stream_iters,
                        quantum, group, FIRST_PART, PARTS, BLOCK_Y, STAGES, BLOCKS, PROMOTE, PART_Y,
                        STREAM, SWAP, BIAS, RESIDUAL, ACT, MMA, LAYOUT,
                    ),
                ),
                (
                    copy_warp,
                    (
                        x_desc, y_desc, x_boxes, y_boxes, y_boxes, full, empty, m, tiles_x, tiles_y,
                        k_iters, whole_tiles, stream_iters, quantum, group, early, BLOCK_X, BLOCK_Y,
                        0, BLOCK_K, STAGES, SWAP,
                    ),
                ),
            ],
            [1],
            [COPY_REGS],
        )  # fmt: skip
