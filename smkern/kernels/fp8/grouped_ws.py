"""Warp-specialised grouped GEMM of e4m3 for sm_90 (Gluon): one warp copies, one or two warpgroups
multiply.

Tiles and the copying warp are those of the bf16 kernel (a pair of e4m3 is copied as 16 bits), sums
over K those of the GEMM of e4m3. X is the operand on the matrix unit's row side: `a`, or `w` when
SWAP. GLU has a second weight tile, the up rows for the gate's columns: swapped, one warpgroup
multiplies both by turns, otherwise they are the halves of a wide tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smkern.kernels.fp8.gemm_sums import ROWS, pass_over, sum_by_turns, sum_pair, sum_wide
from smkern.kernels.fp8.gemm_ws import BLOCK, _scaled
from smkern.kernels.gemm_ws import _finish
from smkern.kernels.grouped_ws import _copy_warp, _tile, _tile_ends

HALF = gl.constexpr(64)
"""Columns of a sum of a wide tile."""


@gluon.jit
def _store(
    total, row0, col0, first, end, out_ptr, n, out_stride, LAYOUT: gl.constexpr, SWAP: gl.constexpr
):
    """The store of one sum's columns: rows from `row0` of `a` on, before the expert's `end`."""
    x0 = row0
    y0 = col0
    if SWAP:
        x0 = col0
        y0 = row0
    COLUMNS: gl.constexpr = total.shape[1]
    _finish(
        total, x0, y0, first, out_ptr, out_ptr, out_ptr, end, n, out_stride, out_stride,
        out_ptr, 0, 0, 0, 1, 1, 1, 1, 0, 1, False, COLUMNS, LAYOUT, SWAP, False, False, "none",
    )  # fmt: skip


@gluon.jit
def _gated(
    gate, up, a_scale, w_scale, up_scale, row0, col0, a_step, w_step, end, n,
    X_ROWS: gl.constexpr, Y_ROWS: gl.constexpr, BLOCKS: gl.constexpr, SWAP: gl.constexpr,
):  # fmt: skip
    """silu(gate) * up; scales of blocks are in both already."""
    if not BLOCKS:
        gate = _scaled(
            gate, a_scale, w_scale, row0, col0, a_step, w_step, end, n, X_ROWS, Y_ROWS, SWAP
        )
        up = _scaled(
            up, a_scale, up_scale, row0, col0, a_step, w_step, end, n, X_ROWS, Y_ROWS, SWAP
        )
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _multiply_tile(
    a_bufs, w_bufs, full, empty, scales, results, expert, row0, end, col0, half_rows, k_iters,
    stage, phase,
    PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_Y: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, GLU: gl.constexpr, SWAP: gl.constexpr, MMA: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply and store a warpgroup's part of a tile: rows from `row0`, columns from `col0`."""
    X_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    Y_ROWS: gl.constexpr = gl.SliceLayout(0, MMA)
    A_ROWS: gl.constexpr = Y_ROWS if SWAP else X_ROWS
    A_LENGTH: gl.constexpr = BLOCK_Y if SWAP else ROWS
    a_scale, w_scale, a_step, a_block_step, w_step, w_expert_step = scales
    out_ptr, n, out_stride = results
    w_scale += expert.to(gl.int64) * w_expert_step
    up_scale = w_scale + half_rows * w_step
    a_at = a_scale
    w_at = w_scale
    up_at = w_scale
    in_fours = 0
    if BLOCKS:
        # rows past the expert's end are not stored
        row = gl.minimum(row0 + gl.arange(0, A_LENGTH, layout=A_ROWS), end - 1)
        a_at = a_scale + row.to(gl.int64) * a_step
        # past the end of an expert's weights the last block's serve
        block = gl.minimum(col0, n * 8 - 1) // BLOCK
        w_at = w_scale + block.to(gl.int64) * w_step
        up_at = w_at + (half_rows // BLOCK).to(gl.int64) * w_step
        apart = (a_scale.to(gl.int64) % 16 != 0) | (a_block_step != 1) | (a_step % 4 != 0)
        in_fours = apart == 0
    if GLU and SWAP:
        gate, up, stage, phase = sum_pair(
            w_bufs, a_bufs, full, empty, stage, phase, k_iters, a_at, w_at, up_at, a_block_step,
            BLOCK_Y, STAGES, BLOCKS, MMA,
        )  # fmt: skip
        total = _gated(
            gate, up, a_scale, w_scale, up_scale, row0, col0, a_step, w_step, end, n, X_ROWS,
            Y_ROWS, BLOCKS, SWAP,
        )  # fmt: skip
        _store(total, row0, col0, row0, end, out_ptr, n, out_stride, LAYOUT, SWAP)
    elif GLU:
        gate, more_gate, up, more_up, stage, phase = sum_wide(
            a_bufs, w_bufs, full, empty, stage, phase, k_iters, a_at, w_at, up_at, a_block_step,
            PART, PARTS, STAGES, BLOCKS, MMA,
        )  # fmt: skip
        gates = (gate, more_gate)
        ups = (up, more_up)
        for half in gl.static_range(2):
            col = col0 + half * HALF
            total = _gated(
                gates[half], ups[half], a_scale, w_scale, up_scale, row0, col, a_step, w_step, end,
                n, X_ROWS, Y_ROWS, BLOCKS, SWAP,
            )  # fmt: skip
            _store(total, row0, col, row0, end, out_ptr, n, out_stride, LAYOUT, SWAP)
    else:
        if SWAP:
            a_bufs, w_bufs = w_bufs, a_bufs
        total, stage, phase = sum_by_turns(
            a_bufs, w_bufs, full, empty, stage, phase, k_iters, a_at, w_at, a_block_step, in_fours,
            PART, PARTS, BLOCK_Y, STAGES, BLOCKS, SWAP, MMA,
        )  # fmt: skip
        if not BLOCKS:
            total = _scaled(
                total, a_scale, w_scale, row0, col0, a_step, w_step, end, n, X_ROWS, Y_ROWS, SWAP
            )
        _store(total, row0, col0, row0, end, out_ptr, n, out_stride, LAYOUT, SWAP)
    return stage, phase


@gluon.jit
def _multiply(
    operands, scales, results, ends, offsets_ptr, rows,
    PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, GLU: gl.constexpr, SWAP: gl.constexpr,
    MMA: gl.constexpr, LAYOUT: gl.constexpr, EXPERT_LAYOUT: gl.constexpr,
):  # fmt: skip
    BLOCK_Y: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    a_bufs, w_bufs, full, empty, half_rows, k_iters = operands
    gdc_wait()
    tiles = gl.max(ends.load(EXPERT_LAYOUT), 0)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # read for each tile: registers are the sums'
        expert, row0, end, tile_n = _tile(
            tile, ends.load(EXPERT_LAYOUT), offsets_ptr, rows, BLOCK_M
        )
        col0 = tile_n * BLOCK_N
        if SWAP:
            col0 += PART * ROWS
        else:
            row0 += PART * ROWS
        if row0 < end:
            stage, phase = _multiply_tile(
                a_bufs, w_bufs, full, empty, scales, results, expert, row0, end, col0, half_rows,
                k_iters, stage, phase, PART, PARTS, BLOCK_Y, STAGES, BLOCKS, GLU, SWAP, MMA, LAYOUT,
            )  # fmt: skip
        else:
            stage, phase = pass_over(full, empty, stage, phase, k_iters, STAGES)


@gluon.jit
def _copy(
    operands,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GLU: gl.constexpr, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    (
        a_desc, w_desc, a_boxes, w_boxes, full, empty, offsets_ptr, rows, num_experts, expert_rows,
        half_rows, tiles_n, k_iters,
    ) = operands  # fmt: skip
    _copy_warp(
        a_desc, w_desc, a_boxes, w_boxes, full, empty, offsets_ptr, rows, num_experts, expert_rows,
        half_rows, tiles_n, k_iters, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GLU, EXPERTS, LAYOUT,
    )  # fmt: skip


@gluon.jit
def fp8_grouped_ws(
    a_desc, w_desc, a_scale, w_scale, offsets_ptr, out_ptr, rows, num_experts, n, expert_rows,
    half_rows, out_stride, a_step, a_block_step, w_step, w_expert_step, tiles_n, k_iters,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, BLOCKS: gl.constexpr, GLU: gl.constexpr, SWAP: gl.constexpr,
    EXPERTS: gl.constexpr, COPY_LAYOUT: gl.constexpr, EXPERT_LAYOUT: gl.constexpr,
    MMA: gl.constexpr, LAYOUT: gl.constexpr, FLAT: gl.constexpr, REGS: gl.constexpr,
    COPY_REGS: gl.constexpr,
):  # fmt: skip
    """out [rows, 8n]: rows offsets[e] to offsets[e + 1] are (a @ w[e]^T) * scales, or silu(gate) *
    up of them.

    w is [num_experts * expert_rows, K]; the up rows are `half_rows` behind the gate's. n and
    out_stride count units of 8 elements; a step of BLOCK_K pairs is 128 products deep.
    """
    HALVES: gl.constexpr = 2 if GLU else 1
    A_BOX: gl.constexpr = BLOCK_M if SWAP else ROWS
    W_BOX: gl.constexpr = ROWS if SWAP else BLOCK_N
    a_boxes = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_boxes = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * HALVES, BLOCK_N, BLOCK_K], w_desc.layout
    )
    a_bufs = a_boxes._reinterpret(
        gl.float8e4nv, [STAGES * BLOCK_M // A_BOX, A_BOX, 2 * BLOCK_K], FLAT
    )
    w_bufs = w_boxes._reinterpret(
        gl.float8e4nv, [STAGES * HALVES * BLOCK_N // W_BOX, W_BOX, 2 * BLOCK_K], FLAT
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    gdc_wait()
    ends.store(_tile_ends(offsets_ptr, rows, num_experts, tiles_n, BLOCK_M, EXPERTS, EXPERT_LAYOUT))
    gl.thread_barrier()
    operands = (a_bufs, w_bufs, full, empty, half_rows, k_iters)
    results = (out_ptr, n, out_stride)
    scales = (a_scale, w_scale, a_step, a_block_step, w_step, w_expert_step)
    FIRST_PART: gl.constexpr = 0
    SECOND_PART: gl.constexpr = 1
    copies = (
        a_desc, w_desc, a_boxes, w_boxes, full, empty, offsets_ptr, rows, num_experts, expert_rows,
        half_rows, tiles_n, k_iters,
    )  # fmt: skip
    if PARTS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        operands, scales, results, ends, offsets_ptr, rows, FIRST_PART, PARTS,
                        BLOCK_M, BLOCK_N, STAGES, BLOCKS, GLU, SWAP, MMA, LAYOUT, EXPERT_LAYOUT,
                    ),
                ),
                (
                    _multiply,
                    (
                        operands, scales, results, ends, offsets_ptr, rows, SECOND_PART, PARTS,
                        BLOCK_M, BLOCK_N, STAGES, BLOCKS, GLU, SWAP, MMA, LAYOUT, EXPERT_LAYOUT,
                    ),
                ),
                (
                    _copy,
                    (copies, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GLU, EXPERTS, COPY_LAYOUT),
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
                        operands, scales, results, ends, offsets_ptr, rows, FIRST_PART, PARTS,
                        BLOCK_M, BLOCK_N, STAGES, BLOCKS, GLU, SWAP, MMA, LAYOUT, EXPERT_LAYOUT,
                    ),
                ),
                (
                    _copy,
                    (copies, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GLU, EXPERTS, COPY_LAYOUT),
                ),
            ],
            [1],
            [COPY_REGS],
        )  # fmt: skip
