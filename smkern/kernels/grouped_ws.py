"""Warp-specialised grouped GEMM for sm_90 (Gluon): one warp copies, 4 or 8 multiply.

Rows of `a` are sorted by expert; each expert has its own weights. Tiles are derived on the device
from `offsets`, by a prefix sum over the experts in each role's registers, without the host or
another CTA. The copying warp runs ahead across tiles and experts. X is the operand on the matrix
unit's row side: `a`, or `w` when SWAP; GLU has a second weight tile, the up rows for the gate's
columns, and a second accumulator.
"""

import triton
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

from smkern.kernels.gemm_ws import _finish


@triton.constexpr_function
def stored_columns(x, y, warps):
    """Columns that the epilogue stages in shared memory at a time: 64 elements per thread."""
    return max(16, min(y, 64 * 32 * warps // x))


@triton.constexpr_function
def product_layout(x, y, warps):
    """Layout of an accumulator [x, y]: 16 rows per warp, if there are enough rows."""
    warps_x = warps if x >= 16 * warps else 4
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[warps_x, warps // warps_x],
        instr_shape=[16, min(y * warps_x // warps, 256), 16],
    )


@triton.constexpr_function
def stored_layout(x, y, warps, swap):
    """16 bytes per thread, contiguous along the output's rows (X when swapped)."""
    if swap:
        lanes = min(32, x // 8)
        return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, warps], [0, 1])
    lanes = min(32, y // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _bound(offsets_ptr, at, rows):
    """Where an expert's rows begin, clamped to [0, rows] against bad offsets."""
    return gl.minimum(gl.maximum(gl.load(offsets_ptr + at), 0), rows)


@gluon.jit
def _tile_ends(
    offsets_ptr, rows, num_experts, tiles_n, BLOCK_M: gl.constexpr, EXPERTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """For each expert, the number of tiles up to and including it."""
    expert = gl.arange(0, EXPERTS, layout=LAYOUT)
    known = expert < num_experts
    begin = gl.load(offsets_ptr + expert, mask=known, other=0)
    end = gl.load(offsets_ptr + expert + 1, mask=known, other=0)
    begin = gl.minimum(gl.maximum(begin, 0), rows)
    end = gl.minimum(gl.maximum(end, 0), rows)
    tiles = (gl.maximum(end - begin, 0) + BLOCK_M - 1) // BLOCK_M * tiles_n
    return gl.associative_scan(tiles, 0, _add)


@gluon.jit
def _tile(tile, ends, offsets_ptr, rows, BLOCK_M: gl.constexpr):
    """A tile's expert, its first row, the expert's last row, and the tile's column index.

    Row tiles of the same weights follow each other.
    """
    passed = ends <= tile
    expert = gl.sum(passed.to(gl.int32), 0)
    first = gl.max(gl.where(passed, ends, 0), 0)
    begin = _bound(offsets_ptr, expert, rows)
    end = _bound(offsets_ptr, expert + 1, rows)
    tiles_m = (end - begin + BLOCK_M - 1) // BLOCK_M
    within = tile - first
    return expert, begin + within % tiles_m * BLOCK_M, end, within // tiles_m


@gluon.jit
def _copy_warp(
    a_desc, w_desc, a_bufs, w_bufs, full, empty, offsets_ptr, rows, num_experts, expert_rows,
    half_rows, tiles_n, k_iters,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GLU: gl.constexpr, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if GLU else 1
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_M + HALVES * BLOCK_N)
    gdc_wait()
    ends = _tile_ends(offsets_ptr, rows, num_experts, tiles_n, BLOCK_M, EXPERTS, LAYOUT)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), gl.max(ends, 0), gl.num_programs(0)):
        expert, row, _, tile_n = _tile(tile, ends, offsets_ptr, rows, BLOCK_M)
        weight = expert * expert_rows + tile_n * BLOCK_N
        for k in range(k_iters):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    w_desc,
                    [weight + half * half_rows, k * BLOCK_K],
                    bar,
                    w_bufs.index(stage * HALVES + half),
                )
            tma.async_copy_global_to_shared(a_desc, [row, k * BLOCK_K], bar, a_bufs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _product(a, w, acc, use_acc, SWAP: gl.constexpr):
    if SWAP:
        acc = warpgroup_mma(w, a.permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    else:
        acc = warpgroup_mma(a, w.permute((1, 0)), acc, use_acc=use_acc, is_async=True)
    return acc


@gluon.jit
def _wait(acc, up, GLU: gl.constexpr, OUTSTANDING: gl.constexpr):
    """Wait until all products but those of the last OUTSTANDING steps are done."""
    if GLU:
        acc, up = warpgroup_mma_wait(num_outstanding=2 * OUTSTANDING, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(acc,))
    return acc, up


@gluon.jit
def _multiply_tile(
    a_bufs, w_bufs, full, empty, out_ptr, row, end, tile_n, n, out_stride, k_iters, stage, phase,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, EAGER: gl.constexpr,
    GLU: gl.constexpr, SWAP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Multiply and store one tile, using the first ROWS of the copied rows."""
    HALVES: gl.constexpr = 2 if GLU else 1
    OUTSTANDING: gl.constexpr = 0 if EAGER else 1
    X: gl.constexpr = BLOCK_N if SWAP else ROWS
    Y: gl.constexpr = ROWS if SWAP else BLOCK_N
    MMA: gl.constexpr = product_layout(X, Y, WARPS)
    PART_Y: gl.constexpr = stored_columns(X, Y, WARPS)
    STORED: gl.constexpr = stored_layout(X, PART_Y, WARPS, SWAP)
    acc = gl.zeros([X, Y], gl.float32, layout=MMA)
    up = gl.zeros([X, Y], gl.float32, layout=MMA)
    for k in range(k_iters):
        mbarrier.wait(full.index(stage), phase)
        a = a_bufs.index(stage).slice(0, ROWS)
        acc = _product(a, w_bufs.index(stage * HALVES), acc, k > 0, SWAP)
        if GLU:
            up = _product(a, w_bufs.index(stage * HALVES + 1), up, k > 0, SWAP)
        acc, up = _wait(acc, up, GLU, OUTSTANDING)
        # with EAGER this stage may be overwritten now, otherwise the previous one
        if EAGER:
            mbarrier.arrive(empty.index(stage), count=1)
        else:
            previous = gl.where(stage == 0, STAGES - 1, stage - 1)
            mbarrier.arrive(empty.index(previous), count=1, pred=k > 0)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    acc, up = _wait(acc, up, GLU, 0)
    if not EAGER:
        previous = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(previous), count=1)
    if GLU:
        acc = acc / (1.0 + gl.exp(-acc)) * up
    row0 = row
    col0 = tile_n * BLOCK_N
    if SWAP:
        row0 = tile_n * BLOCK_N
        col0 = row
    _finish(
        acc, row0, col0, row, out_ptr, out_ptr, out_ptr, end, n, out_stride, out_stride,
        out_ptr, 0, 0, 0, 1, 1, 1, 1, 0, False, PART_Y, STORED, SWAP, False, False, "none",
    )  # fmt: skip
    return stage, phase


@gluon.jit
def _multiply_warps(
    a_bufs, w_bufs, full, empty, out_ptr, offsets_ptr, rows, num_experts, n, out_stride, tiles_n,
    k_iters,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, EAGER: gl.constexpr,
    GLU: gl.constexpr, SWAP: gl.constexpr, TAILS: gl.constexpr, EXPERTS: gl.constexpr,
    LAYOUT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """With TAILS an expert's last rows are a half or a quarter of a tile, if they fit."""
    gdc_wait()
    ends = _tile_ends(offsets_ptr, rows, num_experts, tiles_n, BLOCK_M, EXPERTS, LAYOUT)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.max(ends, 0), gl.num_programs(0)):
        _, row, end, tile_n = _tile(tile, ends, offsets_ptr, rows, BLOCK_M)
        if TAILS:
            if end - row <= BLOCK_M // 4:
                stage, phase = _multiply_tile(
                    a_bufs, w_bufs, full, empty, out_ptr, row, end, tile_n, n, out_stride, k_iters,
                    stage, phase, BLOCK_M // 4, BLOCK_N, STAGES, EAGER, GLU, SWAP, WARPS,
                )  # fmt: skip
            elif end - row <= BLOCK_M // 2:
                stage, phase = _multiply_tile(
                    a_bufs, w_bufs, full, empty, out_ptr, row, end, tile_n, n, out_stride, k_iters,
                    stage, phase, BLOCK_M // 2, BLOCK_N, STAGES, EAGER, GLU, SWAP, WARPS,
                )  # fmt: skip
            else:
                stage, phase = _multiply_tile(
                    a_bufs, w_bufs, full, empty, out_ptr, row, end, tile_n, n, out_stride, k_iters,
                    stage, phase, BLOCK_M, BLOCK_N, STAGES, EAGER, GLU, SWAP, WARPS,
                )  # fmt: skip
        else:
            stage, phase = _multiply_tile(
                a_bufs, w_bufs, full, empty, out_ptr, row, end, tile_n, n, out_stride, k_iters,
                stage, phase, BLOCK_M, BLOCK_N, STAGES, EAGER, GLU, SWAP, WARPS,
            )  # fmt: skip


@gluon.jit
def grouped_ws(
    a_desc, w_desc, out_ptr, offsets_ptr, rows, num_experts, n, expert_rows, half_rows, out_stride,
    tiles_n, k_iters,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    EAGER: gl.constexpr, GLU: gl.constexpr, SWAP: gl.constexpr, TAILS: gl.constexpr,
    EXPERTS: gl.constexpr, COPY_LAYOUT: gl.constexpr, LAYOUT: gl.constexpr, WARPS: gl.constexpr,
    COPY_REGS: gl.constexpr,
):  # fmt: skip
    """out [rows, 8n]: rows offsets[e] to offsets[e + 1] are a @ w[e]^T, or silu(gate) * up.

    w is [num_experts * expert_rows, K]; the up rows are `half_rows` behind the gate's. n and
    out_stride count units of 8 elements.
    """
    HALVES: gl.constexpr = 2 if GLU else 1
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES * HALVES, BLOCK_N, BLOCK_K], w_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply_warps,
                (
                    a_bufs, w_bufs, full, empty, out_ptr, offsets_ptr, rows, num_experts, n,
                    out_stride, tiles_n, k_iters,
                    BLOCK_M, BLOCK_N, STAGES, EAGER, GLU, SWAP, TAILS, EXPERTS, LAYOUT, WARPS,
                ),
            ),
            (
                _copy_warp,
                (
                    a_desc, w_desc, a_bufs, w_bufs, full, empty, offsets_ptr, rows, num_experts,
                    expert_rows, half_rows, tiles_n, k_iters,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GLU, EXPERTS, COPY_LAYOUT,
                ),
            ),
        ],
        [1],
        [COPY_REGS],
    )  # fmt: skip
