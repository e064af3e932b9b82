"""Gate and up by e4m3, silu(gate) * up, and its quantization, in one kernel for sm_90 (Gluon).

A tile is 128 rows by 128 columns of the gate and the same columns of up: the 128 results that share
a scale are in the registers of one warpgroup, and gate and up are never written. Sums, copies and
raster are the wide GEMM's; K is whole.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smkern.kernels import gemm_tiles as _schedule
from smkern.kernels.fp8 import rows_math as _rows
from smkern.kernels.fp8.gemm_sums import ROWS, sum_wide
from smkern.kernels.gemm_ws import _activate
from smkern.kernels.gemm_ws_copy import copy_warp

_tile_coords = gluon.jit(_schedule._tile_coords)
_first_row = gluon.jit(_schedule._first_row)
_magnitude = gluon.jit(_rows._magnitude)
_scale_of = gluon.jit(_rows._scale_of)
_inverse = gluon.jit(_rows._inverse)

PARTS = gl.constexpr(2)
BLOCK = gl.constexpr(128)
"""Columns of a tile's gate and of its up, and of a result's scale."""
HALF = gl.constexpr(64)
"""Columns of a sum."""
UNIT = gl.constexpr(16)
"""Elements that the result's stride counts."""


@gluon.jit
def _gated(gate, up, DTYPE: gl.constexpr):
    """silu(gate) * up, rounded where two kernels would round."""
    gate = gate.to(DTYPE).to(gl.float32)
    up = up.to(DTYPE).to(gl.float32)
    return (_activate(gate, "silu") * up).to(DTYPE).to(gl.float32)


@gluon.jit
def _store(value, inverse, row0, col0, own, out_ptr, m, out_stride, LAYOUT: gl.constexpr):
    """The store of one sum's columns."""
    q = gl.convert_layout((value * inverse[:, None]).to(gl.float8e4nv), LAYOUT)
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = col0 + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    at = row.to(gl.int64)[:, None] * (out_stride * UNIT) + column.to(gl.int64)[None, :]
    gl.store(out_ptr + at, q, mask=((row < m) & (row >= own))[:, None])


@gluon.jit
def _multiply(
    operands, schedule,
    PART: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    BLOCK_X: gl.constexpr = PARTS * ROWS
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    (
        x_bufs, y_bufs, full, empty, out_ptr, out_scale, a_scale, w_scale, m, out_stride,
        out_step, out_block_step, a_step, a_block_step, w_step,
    ) = operands  # fmt: skip
    tiles_x, tiles_y, k_iters, group = schedule
    gdc_wait()
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_x * tiles_y, gl.num_programs(0)):
        tile_x, tile_y = _tile_coords(tile, tiles_x, tiles_y, group)
        row0 = _first_row(tile_x, BLOCK_X, m) + PART * ROWS
        own = tile_x * BLOCK_X
        row = row0 + gl.arange(0, ROWS, layout=OF_ROWS)
        known = gl.minimum(row, m - 1)
        gate_at = w_scale + tile_y.to(gl.int64) * w_step
        up_at = w_scale + (tiles_y + tile_y).to(gl.int64) * w_step
        gate, more_gate, up, more_up, stage, phase = sum_wide(
            x_bufs, y_bufs, full, empty, stage, phase, k_iters,
            a_scale + known.to(gl.int64) * a_step, gate_at, up_at, a_block_step, PART, PARTS,
            STAGES, True, MMA,
        )  # fmt: skip
        left = _gated(gate, up, DTYPE)
        right = _gated(more_gate, more_up, DTYPE)
        bits = gl.max(gl.maximum(_magnitude(left), _magnitude(right)), 1)
        scale = _scale_of(bits)
        mask = (row < m) & (row >= own)
        at = row.to(gl.int64) * out_step + tile_y.to(gl.int64) * out_block_step
        gl.store(out_scale + at, scale, mask=mask)
        inverse = _inverse(scale)
        col0 = tile_y * BLOCK
        _store(left, inverse, row0, col0, own, out_ptr, m, out_stride, LAYOUT)
        _store(right, inverse, row0, col0 + HALF, own, out_ptr, m, out_stride, LAYOUT)


@gluon.jit
def fp8_gemm_gated(
    x_desc, y_desc, out_ptr, out_scale, a_scale, w_scale,
    m, out_stride, out_step, out_block_step, a_step, a_block_step, w_step, tiles_x, tiles_y,
    k_iters, group, early,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr,
    LAYOUT: gl.constexpr, FLAT: gl.constexpr, REGS: gl.constexpr, COPY_REGS: gl.constexpr,
):  # fmt: skip
    """out [m, 128 tiles_y], out_scale = quantized silu(x @ gate^T) * (x @ up^T), times scales.

    A box of the weights' map is 128 rows of the gate and 128 of up; `out_stride` counts 16.
    """
    BLOCK_X: gl.constexpr = PARTS * ROWS
    x_boxes = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_X, BLOCK_K], x_desc.layout)
    y_boxes = gl.allocate_shared_memory(y_desc.dtype, [STAGES, 1, 2, BLOCK, BLOCK_K], y_desc.layout)
    x_bufs = x_boxes._reinterpret(gl.float8e4nv, [STAGES * PARTS, ROWS, 2 * BLOCK_K], FLAT)
    y_bufs = y_boxes._reinterpret(gl.float8e4nv, [STAGES * 2, BLOCK, 2 * BLOCK_K], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    operands = (
        x_bufs, y_bufs, full, empty, out_ptr, out_scale, a_scale, w_scale, m, out_stride,
        out_step, out_block_step, a_step, a_block_step, w_step,
    )  # fmt: skip
    schedule = (tiles_x, tiles_y, k_iters, group)
    FIRST_PART: gl.constexpr = 0
    SECOND_PART: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (operands, schedule, FIRST_PART, STAGES, DTYPE, MMA, LAYOUT)),
            (_multiply, (operands, schedule, SECOND_PART, STAGES, DTYPE, MMA, LAYOUT)),
            (
                copy_warp,
                (
                    x_desc, y_desc, x_boxes, y_boxes, y_boxes, full, empty, m, tiles_x, tiles_y,
                    k_iters, tiles_x * tiles_y, 0, 1, group, early, BLOCK_X, 2 * BLOCK, 0, BLOCK_K,
                    STAGES, False,
                ),
            ),
        ],
        [4, 1],
        [REGS, COPY_REGS],
    )  # fmt: skip
