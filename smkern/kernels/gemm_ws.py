"""Warp-specialised persistent GEMM for sm_90 (Gluon): one warp copies, 4 or 8 multiply.

The copying warp runs ahead across tiles, so the pipeline of STAGES shared-memory stages never
drains; the last CTA to arrive sums a streamed tile in index order (no CTA waits).
X is the operand on the matrix unit's row side: `a`, or `w` when SWAP. A tile is BLOCK_X by
BLOCK_Y + EXTRA_Y: the second accumulator allows widths like 192 = 128 + 64.
With SwiGLU a tile's weights are pairs of 8 gate rows and 8 up rows, and its output is half as wide.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smkern.kernels import gemm_tiles as _schedule
from smkern.kernels.gemm_ws_copy import PAIR, barrier, box_rows, boxes_shape, copy_warp

_num_segments = gluon.jit(_schedule._num_segments)
_segment = gluon.jit(_schedule._segment)
_contributors = gluon.jit(_schedule._contributors)
_partial_slot = gluon.jit(_schedule._partial_slot)
_tile_coords = gluon.jit(_schedule._tile_coords)
_first_row = gluon.jit(_schedule._first_row)


@gluon.jit
def _activate(value, ACT: gl.constexpr):
    if ACT == "silu":
        value = value / (1.0 + gl.exp(-value))
    elif ACT == "gelu":
        value = 0.5 * value * (1.0 + gl.erf(value * 0.7071067811865476))
    return value


@gluon.jit
def _swiglu(pairs, SWAP: gl.constexpr):
    """silu(gate) * up of an accumulator of pairs, within each thread; half as large."""
    X: gl.constexpr = pairs.shape[0]
    Y: gl.constexpr = pairs.shape[1]
    HALF: gl.constexpr = PAIR // 2
    if SWAP:
        gate, up = pairs.reshape([X // PAIR, 2, HALF, Y]).permute([0, 2, 3, 1]).split()
        value = (_activate(gate, "silu") * up).reshape([X // 2, Y])
    else:
        gate, up = pairs.reshape([X, Y // PAIR, 2, HALF]).permute([0, 1, 3, 2]).split()
        value = (_activate(gate, "silu") * up).reshape([X, Y // 2])
    return value


@gluon.jit
def _store(
    value, row0, col0, own, out_ptr, bias_ptr, residual_ptr, m, n, out_stride, residual_stride,
    LAYOUT: gl.constexpr, SWAP: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """Bias, activation, residual and the store of one fp32 chunk [X, Y], converted to LAYOUT.

    The output is m x 8n; n and the strides count units of 8 elements, which tells the compiler
    that 16-byte accesses are aligned. Rows before `own` belong to another tile.
    """
    X: gl.constexpr = value.shape[0]
    Y: gl.constexpr = value.shape[1]
    if BIAS:
        if SWAP:
            at = row0 + gl.arange(0, X, layout=gl.SliceLayout(1, value.type.layout))
            value += gl.load(bias_ptr + at, mask=at < n * 8, other=0.0).to(gl.float32)[:, None]
        else:
            at = col0 + gl.arange(0, Y, layout=gl.SliceLayout(0, value.type.layout))
            value += gl.load(bias_ptr + at, mask=at < n * 8, other=0.0).to(gl.float32)[None, :]
    value = _activate(value, ACT)
    x = row0 + gl.arange(0, X, layout=gl.SliceLayout(1, LAYOUT))
    y = col0 + gl.arange(0, Y, layout=gl.SliceLayout(0, LAYOUT))
    if SWAP:
        mask = (x < n * 8)[:, None] & ((y < m) & (y >= own))[None, :]
        offset = x.to(gl.int64)[:, None] + y.to(gl.int64)[None, :] * (out_stride * 8)
    else:
        mask = ((x < m) & (x >= own))[:, None] & (y < n * 8)[None, :]
        offset = x.to(gl.int64)[:, None] * (out_stride * 8) + y.to(gl.int64)[None, :]
    if RESIDUAL:
        if SWAP:
            at = x.to(gl.int64)[:, None] + y.to(gl.int64)[None, :] * (residual_stride * 8)
        else:
            at = x.to(gl.int64)[:, None] * (residual_stride * 8) + y.to(gl.int64)[None, :]
        value = gl.convert_layout(value, LAYOUT)
        value += gl.load(residual_ptr + at, mask=mask, other=0.0).to(gl.float32)
        result = value.to(out_ptr.dtype.element_ty)
    else:
        result = gl.convert_layout(value.to(out_ptr.dtype.element_ty), LAYOUT)
    gl.store(out_ptr + offset, result, mask=mask)


@gluon.jit
def _packed(acc):
    """An accumulator [X, Y] as [Y / 8, 8 * X]: of 8 columns a thread has two in each of two rows,
    which lie side by side here, so partials move by 16 bytes a thread, a warp's without a gap."""
    X: gl.constexpr = acc.shape[0]
    Y: gl.constexpr = acc.shape[1]
    fragments = acc.reshape([X // 16, 2, 8, Y // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return fragments.reshape([Y // 8, 8 * X])


@gluon.jit
def _unpacked(packed, acc):
    """A packed accumulator in the layout of `acc`; no element changes its thread either way."""
    X: gl.constexpr = acc.shape[0]
    Y: gl.constexpr = acc.shape[1]
    fragments = packed.reshape([Y // 8, X // 16, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(fragments.reshape([X, Y]), acc.type.layout, assert_trivial=True)


@gluon.jit
def _partial(partials, slot, packed, TILE: gl.constexpr, FIRST: gl.constexpr):
    """Pointers to a packed accumulator's elements in a workspace slot of TILE elements."""
    LENGTH: gl.constexpr = packed.shape[1]
    row = gl.arange(0, packed.shape[0], layout=gl.SliceLayout(1, packed.type.layout))
    column = gl.arange(0, LENGTH, layout=gl.SliceLayout(0, packed.type.layout))
    return partials + slot.to(gl.int64) * TILE + (FIRST + row[:, None] * LENGTH + column[None, :])


@gluon.jit
def store_partial(partials, slot, acc, TILE: gl.constexpr, FIRST: gl.constexpr):
    """Store an accumulator behind FIRST elements of a workspace slot of TILE."""
    packed = _packed(acc)
    gl.store(_partial(partials, slot, packed, TILE, FIRST), packed)


@gluon.jit
def _load_partial(partials, slot, packed, TILE: gl.constexpr, FIRST: gl.constexpr):
    """What another CTA stored there, packed as `packed` is."""
    return gl.load(_partial(partials, slot, packed, TILE, FIRST), cache_modifier=".cg")


@gluon.jit
def _gather(
    acc, partials, pid, nth, first, pieces, quantum, k_iters,
    TILE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The sum of a tile's partials in index order. Of two, `acc` is one, as a + b = b + a."""
    packed = _packed(acc)
    if pieces == 2:
        slot = _partial_slot(2 * first + 1 - pid, nth, quantum, k_iters)
        packed += _load_partial(partials, slot, packed, TILE, FIRST)
    elif pieces > 2:
        slot = _partial_slot(first, nth, quantum, k_iters)
        packed = _load_partial(partials, slot, packed, TILE, FIRST)
        for piece in range(1, pieces):
            slot = _partial_slot(first + piece, nth, quantum, k_iters)
            packed += _load_partial(partials, slot, packed, TILE, FIRST)
    return _unpacked(packed, acc)


@gluon.jit
def _finish(
    acc, row0, col0, own, out_ptr, bias_ptr, residual_ptr, m, n, out_stride, residual_stride,
    partials, pid, nth, first, pieces, quantum, k_iters,
    TILE: gl.constexpr, FIRST: gl.constexpr, STREAM: gl.constexpr,
    PART_Y: gl.constexpr, LAYOUT: gl.constexpr, SWAP: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Complete and store an accumulator, PART_Y columns at a time: fewer registers and stages."""
    if acc.shape[1] > PART_Y:
        HALF: gl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape([acc.shape[0], 2, HALF]).permute([0, 2, 1]).split()
        _finish(
            left, row0, col0, own, out_ptr, bias_ptr, residual_ptr, m, n, out_stride,
            residual_stride, partials, pid, nth, first, pieces, quantum, k_iters, TILE, FIRST,
            STREAM, PART_Y, LAYOUT, SWAP, BIAS, RESIDUAL, ACT,
        )  # fmt: skip
        _finish(
            right, row0, col0 + HALF, own, out_ptr, bias_ptr, residual_ptr, m, n, out_stride,
            residual_stride, partials, pid, nth, first, pieces, quantum, k_iters, TILE,
            FIRST + acc.shape[0] * HALF, STREAM, PART_Y, LAYOUT, SWAP, BIAS, RESIDUAL, ACT,
        )  # fmt: skip
    else:
        if STREAM:
            acc = _gather(acc, partials, pid, nth, first, pieces, quantum, k_iters, TILE, FIRST)
        if ACT == "swiglu":
            acc = _swiglu(acc, SWAP)
            if SWAP:
                row0 = row0 // 2
            else:
                col0 = col0 // 2
        _store(
            acc, row0, col0, own, out_ptr, bias_ptr, residual_ptr, m, n, out_stride,
            residual_stride, LAYOUT, SWAP, BIAS, RESIDUAL, ACT,
        )  # fmt: skip


@gluon.jit
def _multiply_warps(
    x_bufs, y_bufs, extra_bufs, full, empty, out_ptr, bias_ptr, residual_ptr, partials, counters,
    m, n, out_stride, residual_stride,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group,
    BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr, EXTRA_Y: gl.constexpr, STAGES: gl.constexpr,
    EAGER: gl.constexpr, PART_Y: gl.constexpr, STREAM: gl.constexpr, SWAP: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr, MMA: gl.constexpr,
    EXTRA_MMA: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = BLOCK_X * (BLOCK_Y + EXTRA_Y)
    MAIN: gl.constexpr = BLOCK_X * BLOCK_Y
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
        acc = gl.zeros([BLOCK_X, BLOCK_Y], gl.float32, layout=MMA)
        if EXTRA_Y:
            extra = gl.zeros([BLOCK_X, EXTRA_Y], gl.float32, layout=EXTRA_MMA)
        for k in range(k_begin, k_end):
            mbarrier.wait(full.index(stage), phase)
            x = x_bufs.index(stage)
            acc = warpgroup_mma(
                x, y_bufs.index(stage).permute((1, 0)), acc, use_acc=k > k_begin, is_async=True
            )
            if EXTRA_Y:
                extra = warpgroup_mma(
                    x, extra_bufs.index(stage).permute((1, 0)), extra,
                    use_acc=k > k_begin, is_async=True,
                )  # fmt: skip
            # all products before this step are done: the previous stage may be overwritten
            # (its index is computed: Triton merges variables that start with the same value)
            OUTSTANDING: gl.constexpr = 0 if EAGER else 1
            if EXTRA_Y:
                acc, extra = warpgroup_mma_wait(num_outstanding=2 * OUTSTANDING, deps=(acc, extra))
            else:
                acc = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(acc,))
            if EAGER:
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                previous = gl.where(stage == 0, STAGES - 1, stage - 1)
                mbarrier.arrive(empty.index(previous), count=1, pred=k > k_begin)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if EXTRA_Y:
            acc, extra = warpgroup_mma_wait(num_outstanding=0, deps=(acc, extra))
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if not EAGER:
            previous = gl.where(stage == 0, STAGES - 1, stage - 1)
            mbarrier.arrive(empty.index(previous), count=1)

        if SWAP:
            row0 = tile_x * BLOCK_X
            col0 = _first_row(tile_y, BLOCK_Y + EXTRA_Y, m)
            own = tile_y * (BLOCK_Y + EXTRA_Y)
        else:
            row0 = _first_row(tile_x, BLOCK_X, m)
            col0 = tile_y * (BLOCK_Y + EXTRA_Y)
            own = tile_x * BLOCK_X
        nth = tile - whole_tiles
        first = pid
        pieces = 1
        complete = True
        if STREAM:  # noqa: SIM102 (this one is the compiler's, the next the kernel's)
            if k_end - k_begin < k_iters:
                first, pieces = _contributors(nth, quantum, k_iters)
                # of two CTAs the second need not write its partial if the first has written its own
                arrived = gl.atomic_add(counters + nth, 0, sem="acquire", scope="gpu")
                if (arrived == 0) | (pieces > 2):
                    slot = _partial_slot(pid, nth, quantum, k_iters)
                    store_partial(partials, slot, acc, TILE, 0)
                    if EXTRA_Y:
                        store_partial(partials, slot, extra, TILE, MAIN)
                    barrier()
                    arrived = gl.atomic_add(counters + nth, 1, sem="acq_rel", scope="gpu")
                complete = arrived == pieces - 1
                if complete:
                    gl.store(counters + nth, 0)
        if complete:
            _finish(
                acc, row0, col0, own, out_ptr, bias_ptr, residual_ptr, m, n, out_stride,
                residual_stride, partials, pid, nth, first, pieces, quantum, k_iters,
                TILE, 0, STREAM, PART_Y, LAYOUT, SWAP, BIAS, RESIDUAL, ACT,
            )  # fmt: skip
            if EXTRA_Y:
                _finish(
                    extra, row0, col0 + BLOCK_Y, own, out_ptr, bias_ptr, residual_ptr, m, n,
                    out_stride, residual_stride, partials, pid, nth, first, pieces, quantum,
                    k_iters, TILE, MAIN, STREAM, PART_Y, LAYOUT, SWAP, BIAS, RESIDUAL, ACT,
                )  # fmt: skip


@gluon.jit
def gemm_ws(
    x_desc, y_desc, out_ptr, bias_ptr, residual_ptr, partials, counters,
    m, n, out_stride, residual_stride,
    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early,
    BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr, EXTRA_Y: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, EAGER: gl.constexpr, PART_Y: gl.constexpr, STREAM: gl.constexpr,
    SWAP: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
    MMA: gl.constexpr, EXTRA_MMA: gl.constexpr, LAYOUT: gl.constexpr, COPY_REGS: gl.constexpr,
):  # fmt: skip
    """out [m, 8n] = act(x @ y^T + bias) + residual, or silu(gate) * up; n and strides in eights.

    EAGER releases a stage as soon as its product is done instead of one step later: one more stage
    in flight, for memory-bound shapes.
    """
    BOXES: gl.constexpr = BLOCK_Y // box_rows(y_desc.block_type.shape)
    # of the two maps, only the activations' has the matrix's own layout with SwiGLU
    FLAT: gl.constexpr = y_desc.layout if SWAP else x_desc.layout
    x_boxes = gl.allocate_shared_memory(
        x_desc.dtype, boxes_shape(STAGES, x_desc.block_type.shape), x_desc.layout
    )
    y_boxes = gl.allocate_shared_memory(
        y_desc.dtype, boxes_shape(STAGES * BOXES, y_desc.block_type.shape), y_desc.layout
    )
    x_bufs = x_boxes._reinterpret(x_desc.dtype, [STAGES, BLOCK_X, BLOCK_K], FLAT)
    y_bufs = y_boxes._reinterpret(y_desc.dtype, [STAGES, BLOCK_Y, BLOCK_K], FLAT)
    extra_boxes = y_boxes
    extra_bufs = y_bufs
    if EXTRA_Y:
        extra_boxes = gl.allocate_shared_memory(
            y_desc.dtype, boxes_shape(STAGES, y_desc.block_type.shape), y_desc.layout
        )
        extra_bufs = extra_boxes._reinterpret(y_desc.dtype, [STAGES, EXTRA_Y, BLOCK_K], FLAT)
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
                    x_bufs, y_bufs, extra_bufs, full, empty, out_ptr, bias_ptr, residual_ptr,
                    partials, counters, m, n, out_stride, residual_stride,
                    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group,
                    BLOCK_X, BLOCK_Y, EXTRA_Y, STAGES, EAGER, PART_Y, STREAM, SWAP, BIAS, RESIDUAL,
                    ACT, MMA, EXTRA_MMA, LAYOUT,
                ),
            ),
            (
                copy_warp,
                (
                    x_desc, y_desc, x_boxes, y_boxes, extra_boxes, full, empty, m,
                    tiles_x, tiles_y, k_iters, whole_tiles, stream_iters, quantum, group, early,
                    BLOCK_X, BLOCK_Y, EXTRA_Y, BLOCK_K, STAGES, SWAP,
                ),
            ),
        ],
        [1],
        [COPY_REGS],
    )  # fmt: skip
