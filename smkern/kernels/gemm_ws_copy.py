"""The copying warp of the warp-specialised GEMM: both operands, stage by stage, by tensor maps.

With SwiGLU the weights' map has four dimensions, [I / 8, 2, 8, K] of w [2I, K], so that a box of
B / 16 x 2 x 8 rows alternates 8 gate rows and 8 up rows: gate and up of an output are then in
registers of the same thread, whichever side of the matrix unit the weights are on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from smkern.kernels import gemm_tiles as _schedule

_num_segments = gluon.jit(_schedule._num_segments)
_segment = gluon.jit(_schedule._segment)
_tile_coords = gluon.jit(_schedule._tile_coords)
_first_row = gluon.jit(_schedule._first_row)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6's name


PAIR = gl.constexpr(16)
"""Rows of a pair: 8 gate rows, 8 up rows."""


@gluon.constexpr_function
def group_rows(box):
    """Rows of the operand that the first dimension of its map counts."""
    return box[1] * box[2] if len(box) == 4 else 1


@gluon.constexpr_function
def box_rows(box):
    """Rows of the operand per copy."""
    return box[0] * group_rows(box)


@gluon.constexpr_function
def boxes_shape(count, box):
    """Shape of shared memory for `count` boxes."""
    return [count, *box]


@gluon.jit
def _copy(desc, row, column, bar, buffer):
    GROUP: gl.constexpr = group_rows(desc.block_type.shape)
    if GROUP > 1:
        tma.async_copy_global_to_shared(desc, [row // GROUP, 0, 0, column], bar, buffer)
    else:
        tma.async_copy_global_to_shared(desc, [row, column], bar, buffer)


@gluon.jit
def _copy_x(x_desc, x_bufs, bar, stage, row, k, BLOCK_K: gl.constexpr):
    _copy(x_desc, row, k * BLOCK_K, bar, x_bufs.index(stage))


@gluon.jit
def _copy_y(
    y_desc, y_bufs, extra_bufs, bar, stage, row, k,
    BLOCK_Y: gl.constexpr, EXTRA_Y: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    BOX_Y: gl.constexpr = box_rows(y_desc.block_type.shape)
    BOXES: gl.constexpr = BLOCK_Y // BOX_Y
    for box in gl.static_range(BOXES):
        at = row + box * BOX_Y
        _copy(y_desc, at, k * BLOCK_K, bar, y_bufs.index(stage * BOXES + box))
    if EXTRA_Y:
        _copy(y_desc, row + BLOCK_Y, k * BLOCK_K, bar, extra_bufs.index(stage))


@gluon.jit
def _copy_weights(
    x_desc, y_desc, x_bufs, y_bufs, extra_bufs, bar, stage, tile_x, tile_y, k,
    BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr, EXTRA_Y: gl.constexpr, BLOCK_K: gl.constexpr,
    SWAP: gl.constexpr,
):  # fmt: skip
    if SWAP:
        _copy_x(x_desc, x_bufs, bar, stage, tile_x * BLOCK_X, k, BLOCK_K)
    else:
        row = tile_y * (BLOCK_Y + EXTRA_Y)
        _copy_y(y_desc, y_bufs, extra_bufs, bar, stage, row, k, BLOCK_Y, EXTRA_Y, BLOCK_K)


@gluon.jit
def _copy_rows(
    x_desc, y_desc, x_bufs, y_bufs, extra_bufs, bar, stage, tile_x, tile_y, k, m,
    BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr, EXTRA_Y: gl.constexpr, BLOCK_K: gl.constexpr,
    SWAP: gl.constexpr,
):  # fmt: skip
    """Copy a step's activations."""
    if SWAP:
        row = _first_row(tile_y, BLOCK_Y + EXTRA_Y, m)
        _copy_y(y_desc, y_bufs, extra_bufs, bar, stage, row, k, BLOCK_Y, EXTRA_Y, BLOCK_K)
    else:
        row = _first_row(tile_x, BLOCK_X, m)
        _copy_x(x_desc, x_bufs, bar, stage, row, k, BLOCK_K)


@gluon.jit
def copy_warp(
    x_desc, y_desc, x_bufs, y_bufs, extra_bufs, full, empty, m,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early,
    BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr, EXTRA_Y: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """Copy both operands of every K step, stage by stage.

    `early`: number of first stages whose weights are fetched before the previous kernel on the
    stream has ended; everything that kernel may have written is read after the wait.
    """
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_X + BLOCK_Y + EXTRA_Y)
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
            _copy_weights(
                x_desc, y_desc, x_bufs, y_bufs, extra_bufs, bar, ahead, tile_x, tile_y,
                k_begin + ahead, BLOCK_X, BLOCK_Y, EXTRA_Y, BLOCK_K, SWAP,
            )  # fmt: skip
    gdc_wait()
    stage = 0
    phase = 1
    for i in range(segments):
        tile, k_begin, k_end = _segment(
            i, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters
        )
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        for k in range(k_begin, k_end):
            bar = full.index(stage)
            if early > 0:
                early -= 1
            else:
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, BYTES)
                _copy_weights(
                    x_desc, y_desc, x_bufs, y_bufs, extra_bufs, bar, stage, tile_x, tile_y, k,
                    BLOCK_X, BLOCK_Y, EXTRA_Y, BLOCK_K, SWAP,
                )  # fmt: skip
            _copy_rows(
                x_desc, y_desc, x_bufs, y_bufs, extra_bufs, bar, stage, tile_x, tile_y, k, m,
                BLOCK_X, BLOCK_Y, EXTRA_Y, BLOCK_K, SWAP,
            )  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
