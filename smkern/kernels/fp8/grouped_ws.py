"""Warp-specialised grouped GEMM of e4m3 for sm_90 (Gluon): one warp copies, one or two warpgroups
multiply.

Tiles and the copying warp are those of the bf16 kernel (a pair of e4m3 is copied as 16 bits), sums
over K those of the GEMM of e4m3. X is the operand on the matrix unit's row side: `a`, or `w` when
SWAP. GLU has a second weight tile, the up rows for the gate's columns: swapped, one warpgroup
multiplies both by turns, otherwise they are the halves of a wide tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smkern.kernels.fp8.gemm_sums import (
    ROWS,
    pass_over,
    scales_ahead,
    shared_scales,
    sum_by_turns,
    sum_pair,
    sum_wide,
)
from smkern.kernels.fp8.gemm_ws import BLOCK, _scaled
from smkern.kernels.gemm_ws import _finish
from smkern.kernels.gemm_ws_copy import barrier
from smkern.kernels.grouped_ws import _tile, _tile_ends

HALF = gl.constexpr(64)
"""Columns of a sum of a wide tile."""
TOLD = gl.constexpr(4)
"""Numbers that the copying warp tells of a tile: expert, first row, the expert's end, column."""


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
        out_ptr, 0, 0, 0, 1, 1, 1, 1, 0, False, COLUMNS, LAYOUT, SWAP, False, False, "none",
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
    # 1 / (1 + exp(-gate)) in four instructions for 13: no products run meanwhile
    share = gl.inline_asm_elementwise(
        "{ .reg .f32 x; mul.f32 x, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 x, x; "
        "add.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 $0, x; }",
        "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return gate * share * up


@gluon.jit
def _multiply_tile(
    a_bufs, w_bufs, full, empty, shared, scales, results, expert, row0, end, col0, half_rows,
    k_iters, stage, phase,
    PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_Y: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, GLU: gl.constexpr, SWAP: gl.constexpr, MMA: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Multiply and store a warpgroup's part of a tile: rows from `row0`, columns from `col0`."""
    X_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    Y_ROWS: gl.constexpr = gl.SliceLayout(0, MMA)
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
        if SWAP:
            a_at = scales_ahead(a_scale, row0, end - 1, a_step, BLOCK_Y)
        else:
            row = gl.minimum(row0 + gl.arange(0, ROWS, layout=X_ROWS), end - 1)
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
            shared, BLOCK_Y, STAGES, BLOCKS, MMA,
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
            shared, PART, PARTS, False, BLOCK_Y, STAGES, BLOCKS, SWAP, MMA,
        )  # fmt: skip
        if not BLOCKS:
            total = _scaled(
                total, a_scale, w_scale, row0, col0, a_step, w_step, end, n, X_ROWS, Y_ROWS, SWAP
            )
        _store(total, row0, col0, row0, end, out_ptr, n, out_stride, LAYOUT, SWAP)
    return stage, phase


@gluon.jit
def _multiply(
    operands, scales, results, offsets_ptr, rows, num_experts, tiles_n,
    PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, GLU: gl.constexpr, SWAP: gl.constexpr,
    MMA: gl.constexpr, LAYOUT: gl.constexpr, EXPERTS: gl.constexpr, EXPERT_LAYOUT: gl.constexpr,
):  # fmt: skip
    BLOCK_Y: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    a_bufs, w_bufs, full, empty, shared, told, half_rows, k_iters = operands
    gdc_wait()
    ends = _tile_ends(offsets_ptr, rows, num_experts, tiles_n, BLOCK_M, EXPERTS, EXPERT_LAYOUT)
    tiles = gl.max(ends, 0)
    stage = 0
    phase = 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(full.index(stage), phase)
        expert = _hear(told, stage, 0)
        row0 = _hear(told, stage, 1)
        end = _hear(told, stage, 2)
        col0 = _hear(told, stage, 3) * BLOCK_N
        barrier()  # all have heard it before one of them releases the stage
        if SWAP:
            col0 += PART * ROWS
        else:
            row0 += PART * ROWS
        if row0 < end:
            stage, phase = _multiply_tile(
                a_bufs, w_bufs, full, empty, shared.index(PART), scales, results, expert, row0, end,
                col0, half_rows, k_iters, stage, phase, PART, PARTS, BLOCK_Y, STAGES, BLOCKS, GLU,
                SWAP, MMA, LAYOUT,
            )  # fmt: skip
        else:
            stage, phase = pass_over(full, empty, stage, phase, k_iters, STAGES)


@gluon.jit
def _hear(told, stage, WHAT: gl.constexpr):
    """One of the numbers of the tile whose first step is in a stage."""
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(told.index(stage * TOLD + WHAT).load(ALL), 0)


@gluon.jit
def _tell(told, stage, WHAT: gl.constexpr, value):
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    told.index(stage * TOLD + WHAT).store(gl.full([1], 0, gl.int32, layout=ALL) + value)


@gluon.jit
def _copy_warp(
    operands, told,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GLU: gl.constexpr, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy what tiles multiply, stage by stage, and tell of each tile in its first stage: who
    multiplies would search for it while tensor cores wait."""
    HALVES: gl.constexpr = 2 if GLU else 1
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_M + HALVES * BLOCK_N)
    (
        a_desc, w_desc, a_boxes, w_boxes, full, empty, offsets_ptr, rows, num_experts, expert_rows,
        half_rows, tiles_n, k_iters,
    ) = operands  # fmt: skip
    gdc_wait()
    ends = _tile_ends(offsets_ptr, rows, num_experts, tiles_n, BLOCK_M, EXPERTS, LAYOUT)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), gl.max(ends, 0), gl.num_programs(0)):
        expert, row, end, tile_n = _tile(tile, ends, offsets_ptr, rows, BLOCK_M)
        weight = expert * expert_rows + tile_n * BLOCK_N
        for k in range(k_iters):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            if k == 0:
                _tell(told, stage, 0, expert)
                _tell(told, stage, 1, row)
                _tell(told, stage, 2, end)
                _tell(told, stage, 3, tile_n)
                barrier()
            mbarrier.expect(bar, BYTES)
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    w_desc, [weight + half * half_rows, k * BLOCK_K], bar,
                    w_boxes.index(stage * HALVES + half),
                )  # fmt: skip
            tma.async_copy_global_to_shared(a_desc, [row, k * BLOCK_K], bar, a_boxes.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


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
    shared = shared_scales(PARTS, BLOCK_M, BLOCKS and SWAP)
    told = gl.allocate_shared_memory(
        gl.int32, [STAGES * TOLD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTS)
    fence_async_shared()
    operands = (a_bufs, w_bufs, full, empty, shared, told, half_rows, k_iters)
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
                        operands, scales, results, offsets_ptr, rows, num_experts, tiles_n,
                        FIRST_PART, PARTS, BLOCK_M, BLOCK_N, STAGES, BLOCKS, GLU, SWAP, MMA, LAYOUT,
                        EXPERTS, EXPERT_LAYOUT,
                    ),
                ),
                (
                    _multiply,
                    (
                        operands, scales, results, offsets_ptr, rows, num_experts, tiles_n,
                        SECOND_PART, PARTS, BLOCK_M, BLOCK_N, STAGES, BLOCKS, GLU, SWAP, MMA,
                        LAYOUT, EXPERTS, EXPERT_LAYOUT,
                    ),
                ),
                (
                    _copy_warp,
                    (copies, told, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GLU, EXPERTS, COPY_LAYOUT),
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
                        operands, scales, results, offsets_ptr, rows, num_experts, tiles_n,
                        FIRST_PART, PARTS, BLOCK_M, BLOCK_N, STAGES, BLOCKS, GLU, SWAP, MMA, LAYOUT,
                        EXPERTS, EXPERT_LAYOUT,
                    ),
                ),
                (
                    _copy_warp,
                    (copies, told, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GLU, EXPERTS, COPY_LAYOUT),
                ),
            ],
            [1],
            [COPY_REGS],
        )  # fmt: skip
