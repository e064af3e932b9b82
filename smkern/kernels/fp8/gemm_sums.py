"""Sums over K of the warp-specialised GEMM of e4m3 (Gluon): by tensor cores, then in fp32.

Tensor cores add e4m3 products with about 14 bits, so after every step, 128 products, their sum goes
to fp32 registers, times the scales of the step's blocks where there are any. Two sums take turns:
one is promoted while the other is multiplied. Products of one warpgroup alone would leave tensor
cores idle meanwhile, and two warpgroups fall into step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from smkern.kernels.gemm_ws_copy import barrier

ROWS = gl.constexpr(64)
"""Rows of a tile that a warpgroup multiplies."""
TURNS = gl.constexpr(4)
"""Steps whose sums take turns before all are in the total: what is in flight cannot be carried
round a loop, as the compiler would wait for it."""
MANY = gl.constexpr(8)
"""Turns of a warpgroup that is alone on its SM: 4 to 7% faster than 4, as nobody multiplies while
it begins anew. With two of them 8 gain nothing by rows and lose 2 to 3% by blocks."""
QUARTER = gl.constexpr(64)
"""Columns at once of 192 or 256: two sums beside 64 x 256 in all are 192 registers a thread."""


@gluon.jit
def _scales(a_at, w_at, OF_ROWS: gl.constexpr, OF_BLOCKS: gl.constexpr):
    """A step's scales of rows of a, and of its block of w; asked for before the products."""
    by_row = 1.0
    by_block = 1.0
    if OF_ROWS:
        by_row = gl.load(a_at)
    if OF_BLOCKS:
        by_block = gl.load(w_at)
    return by_row, by_block


@gluon.jit
def _scales_of_turns(a_at, a_block_step, in_fours, ALIGNED: gl.constexpr):
    """The scales of rows of a in four steps, by one load where they lie in fours (ALIGNED: always).

    A warp's rows are on as many lines, and each takes a clock of the path to shared memory: by a
    load a step 64 rows took 2 to 13% longer.
    """
    if ALIGNED or in_fours:
        first, second, third, fourth = gl.inline_asm_elementwise(
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [a_at.to(gl.int64)],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        first = gl.load(a_at)
        second = gl.load(a_at + a_block_step)
        third = gl.load(a_at + 2 * a_block_step)
        fourth = gl.load(a_at + 3 * a_block_step)
    return first, second, third, fourth


@gluon.jit
def shared_scales(PARTS: gl.constexpr, BLOCK_Y: gl.constexpr, NEEDED: gl.constexpr):
    """Where each warpgroup has the scales of a swapped tile's rows, of TURNS steps."""
    COLUMNS: gl.constexpr = BLOCK_Y if NEEDED else 1
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [PARTS, TURNS, COLUMNS], LAYOUT)


@gluon.jit
def scales_ahead(a_scale, first, last, a_step, BLOCK_Y: gl.constexpr):
    """Where the scales of a swapped tile's rows lie in the next TURNS steps, [TURNS, BLOCK_Y]."""
    SHARED: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, 4], [0, 1])
    row = gl.minimum(first + gl.arange(0, BLOCK_Y, layout=gl.SliceLayout(0, SHARED)), last)
    return a_scale + row.to(gl.int64)[None, :] * a_step


@gluon.jit
def _ask_ahead(at, a_block_step, steps):
    """The scales of rows in the next steps, TURNS of them at most."""
    turn = gl.arange(0, TURNS, layout=gl.SliceLayout(1, at.type.layout))
    return gl.load(at + turn[:, None] * a_block_step, mask=(turn < steps)[:, None], other=1.0)


@gluon.jit
def _share(value, shared):
    """Put scales of rows where all of a warpgroup's threads read them, a step's side by side.

    From global memory each step takes a warp 16 lines, and a line takes a clock of the path that
    operands are read by: products of 16 rows on 24 SMs took 1.2 times as long.
    """
    barrier()
    shared.store(value)
    barrier()


@gluon.jit
def _of_turn(shared, turn, BLOCK_Y: gl.constexpr, MMA: gl.constexpr):
    """A thread's scales of rows in one of the steps that are shared."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = shared._reinterpret(gl.float32, [TURNS, BLOCK_Y], PLAIN)
    return rows.index(turn).load(gl.SliceLayout(0, MMA))


@gluon.jit
def _stage(x_bufs, y_bufs, stage, PART: gl.constexpr, PARTS: gl.constexpr):
    """A warpgroup's operands in a stage."""
    return x_bufs.index(stage * PARTS + PART), y_bufs.index(stage).permute((1, 0))


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    """The next stage, and its barriers' phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _promoted(total, acc, by_row, by_block, BLOCKS: gl.constexpr, SWAP: gl.constexpr):
    """The fp32 sum with tensor cores' sum, times its scales with BLOCKS.

    By volatile assembly: the compiler may not move it past the next product, which overwrites acc.
    """
    if BLOCKS:
        scale = by_row * by_block
        scale = scale[None, :] if SWAP else scale[:, None]
        total = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, scale, total], dtype=gl.float32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        total = gl.inline_asm_elementwise(
            "add.f32 $0, $1, $2;", "=f,f,f", [acc, total], dtype=gl.float32, is_pure=False, pack=1
        )
    return total


@gluon.jit
def _take_turns(
    x_bufs, y_bufs, full, empty, stage, phase, sums, a_at, w_at, a_block_step, in_fours, shared,
    first, COUNT: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_Y: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, SWAP: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """COUNT steps, of which each is added while the next is multiplied; all that moves with them.

    `first`: which of the shared scales of rows is the first step's.
    """
    SHARED: gl.constexpr = BLOCKS and SWAP
    TOGETHER: gl.constexpr = BLOCKS and not SWAP
    FOURS: gl.constexpr = TOGETHER and COUNT >= TURNS
    ALIGNED: gl.constexpr = COUNT > TURNS
    total, acc, other = sums
    before = stage
    last_row = 1.0
    last_block = 1.0
    by_rows = (1.0, 1.0, 1.0, 1.0)
    for turn in gl.static_range(COUNT):
        if FOURS and turn % TURNS == 0:
            by_rows = _scales_of_turns(a_at, a_block_step, in_fours, ALIGNED)
        by_row, by_block = _scales(a_at, w_at, TOGETHER and not FOURS, BLOCKS)
        if FOURS:
            by_row = by_rows[turn % TURNS]
        if SHARED:
            by_row = _of_turn(shared, first + turn, BLOCK_Y, MMA)
        mbarrier.wait(full.index(stage), phase)
        x, y = _stage(x_bufs, y_bufs, stage, PART, PARTS)
        other = warpgroup_mma(x, y, other, use_acc=False, is_async=True)
        if turn > 0:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            total = _promoted(total, acc, last_row, last_block, BLOCKS, SWAP)
        acc, other = other, acc  # the later one is in flight now
        last_row = by_row
        last_block = by_block
        before = stage
        stage, phase = _advance(stage, phase, STAGES)
        if TOGETHER:
            a_at += 1 if ALIGNED else a_block_step
        if BLOCKS:
            w_at += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(before), count=1)
    total = _promoted(total, acc, last_row, last_block, BLOCKS, SWAP)
    return (total, acc, other), stage, phase, a_at, w_at


@gluon.jit
def sum_by_turns(
    x_bufs, y_bufs, full, empty, stage, phase, steps, a_at, w_at, a_block_step, in_fours, shared,
    PART: gl.constexpr, PARTS: gl.constexpr, ALONE: gl.constexpr, BLOCK_Y: gl.constexpr,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, SWAP: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The products of so many steps, [64, BLOCK_Y], and the stage and phase after them.

    Swapped, with BLOCKS, `a_at` is of TURNS steps (`scales_ahead`), and `shared` is where they go.
    """
    # swapped, a thread has scales of a quarter of the columns: those of four steps would spill
    SHARED: gl.constexpr = BLOCKS and SWAP
    total = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
    acc = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
    other = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
    sums = (total, acc, other)
    many = 0
    if ALONE and not SHARED:
        if not BLOCKS or in_fours:
            many = steps // MANY * MANY
        for _ in range(0, many, MANY):
            sums, stage, phase, a_at, w_at = _take_turns(
                x_bufs, y_bufs, full, empty, stage, phase, sums, a_at, w_at, a_block_step, in_fours,
                shared, 0, MANY, PART, PARTS, BLOCK_Y, STAGES, BLOCKS, SWAP, MMA,
            )  # fmt: skip
    turned = steps // TURNS * TURNS
    if SHARED:
        ahead = _ask_ahead(a_at, a_block_step, steps)
    for at in range(many, turned, TURNS):
        if SHARED:
            _share(ahead, shared)
            a_at += TURNS * a_block_step
            ahead = _ask_ahead(a_at, a_block_step, steps - at - TURNS)
        sums, stage, phase, a_at, w_at = _take_turns(
            x_bufs, y_bufs, full, empty, stage, phase, sums, a_at, w_at, a_block_step, in_fours,
            shared, 0, TURNS, PART, PARTS, BLOCK_Y, STAGES, BLOCKS, SWAP, MMA,
        )  # fmt: skip
    if SHARED:
        _share(ahead, shared)
    paired = steps // 2 * 2
    for _ in range(turned, paired, 2):
        sums, stage, phase, a_at, w_at = _take_turns(
            x_bufs, y_bufs, full, empty, stage, phase, sums, a_at, w_at, a_block_step, in_fours,
            shared, 0, 2, PART, PARTS, BLOCK_Y, STAGES, BLOCKS, SWAP, MMA,
        )  # fmt: skip
    for _ in range(paired, steps):
        sums, stage, phase, a_at, w_at = _take_turns(
            x_bufs, y_bufs, full, empty, stage, phase, sums, a_at, w_at, a_block_step, in_fours,
            shared, paired - turned, 1, PART, PARTS, BLOCK_Y, STAGES, BLOCKS, SWAP, MMA,
        )  # fmt: skip
    return sums[0], stage, phase


@gluon.jit
def sum_wide(
    x_bufs, y_bufs, full, empty, stage, phase, steps, a_at, w_at, next_at, a_block_step,
    PART: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """The products of so many steps by 256 columns in quarters, and the stage and phase after them.

    Rows of x are fetched into registers once a step, as four quarters would read them from shared
    memory four times.
    """
    X: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    acc = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    other = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    first = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    second = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    third = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    fourth = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    for _ in range(steps):
        by_row, by_block = _scales(a_at, w_at, BLOCKS, BLOCKS)
        _, by_next = _scales(a_at, next_at, False, BLOCKS)
        if BLOCKS:
            a_at += a_block_step
            w_at += 1
            next_at += 1
        mbarrier.wait(full.index(stage), phase)
        x = x_bufs.index(stage * PARTS + PART).load(X)
        low = y_bufs.index(stage * 2)
        high = y_bufs.index(stage * 2 + 1)
        y = low.slice(0, QUARTER).permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=False, is_async=True)
        y = low.slice(QUARTER, QUARTER).permute((1, 0))
        other = warpgroup_mma(x, y, other, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        first = _promoted(first, acc, by_row, by_block, BLOCKS, False)
        y = high.slice(0, QUARTER).permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=False, is_async=True)
        other = warpgroup_mma_wait(num_outstanding=1, deps=(other,))
        second = _promoted(second, other, by_row, by_block, BLOCKS, False)
        y = high.slice(QUARTER, QUARTER).permute((1, 0))
        other = warpgroup_mma(x, y, other, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        third = _promoted(third, acc, by_row, by_next, BLOCKS, False)
        other = warpgroup_mma_wait(num_outstanding=0, deps=(other,))
        mbarrier.arrive(empty.index(stage), count=1)
        fourth = _promoted(fourth, other, by_row, by_next, BLOCKS, False)
        stage, phase = _advance(stage, phase, STAGES)
    return first, second, third, fourth, stage, phase


@gluon.jit
def sum_three(
    x_bufs, y_bufs, full, empty, stage, phase, steps, a_at, w_at, middle_at, next_at, a_block_step,
    PART: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """As `sum_wide`, by 192 columns with scales of blocks: three boxes, each within one of w's."""
    X: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    acc = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    other = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    first = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    second = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    third = gl.zeros([ROWS, QUARTER], gl.float32, layout=MMA)
    for _ in range(steps):
        by_row, by_block = _scales(a_at, w_at, True, True)
        _, by_middle = _scales(a_at, middle_at, False, True)
        _, by_next = _scales(a_at, next_at, False, True)
        a_at += a_block_step
        w_at += 1
        middle_at += 1
        next_at += 1
        mbarrier.wait(full.index(stage), phase)
        x = x_bufs.index(stage * PARTS + PART).load(X)
        y = y_bufs.index(stage * 3).permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=False, is_async=True)
        y = y_bufs.index(stage * 3 + 1).permute((1, 0))
        other = warpgroup_mma(x, y, other, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        first = _promoted(first, acc, by_row, by_block, True, False)
        y = y_bufs.index(stage * 3 + 2).permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=False, is_async=True)
        other = warpgroup_mma_wait(num_outstanding=1, deps=(other,))
        second = _promoted(second, other, by_row, by_middle, True, False)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        third = _promoted(third, acc, by_row, by_next, True, False)
        stage, phase = _advance(stage, phase, STAGES)
    return first, second, third, stage, phase


@gluon.jit
def sum_pair(
    x_bufs, y_bufs, full, empty, stage, phase, steps, a_at, w_at, next_at, a_block_step, shared,
    BLOCK_Y: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The products of so many steps of two blocks of 64 rows of weights, swapped, and the stage and
    phase after them: one is added while the other is multiplied."""
    acc = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
    other = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
    first = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
    second = gl.zeros([ROWS, BLOCK_Y], gl.float32, layout=MMA)
    if BLOCKS:
        ahead = _ask_ahead(a_at, a_block_step, steps)
    for at in range(0, steps, TURNS):
        if BLOCKS:
            _share(ahead, shared)
            a_at += TURNS * a_block_step
            ahead = _ask_ahead(a_at, a_block_step, steps - at - TURNS)
        for turn in range(gl.minimum(steps - at, TURNS)):
            by_row, by_block = _scales(a_at, w_at, False, BLOCKS)
            _, by_next = _scales(a_at, next_at, False, BLOCKS)
            if BLOCKS:
                by_row = _of_turn(shared, turn, BLOCK_Y, MMA)
                w_at += 1
                next_at += 1
            mbarrier.wait(full.index(stage), phase)
            y = y_bufs.index(stage).permute((1, 0))
            acc = warpgroup_mma(x_bufs.index(stage * 2), y, acc, use_acc=False, is_async=True)
            other = warpgroup_mma(
                x_bufs.index(stage * 2 + 1), y, other, use_acc=False, is_async=True
            )
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            first = _promoted(first, acc, by_row, by_block, BLOCKS, True)
            other = warpgroup_mma_wait(num_outstanding=0, deps=(other,))
            mbarrier.arrive(empty.index(stage), count=1)
            second = _promoted(second, other, by_row, by_next, BLOCKS, True)
            stage, phase = _advance(stage, phase, STAGES)
    return first, second, stage, phase


@gluon.jit
def pass_over(full, empty, stage, phase, steps, STAGES: gl.constexpr):
    """Release the stages of so many steps, of which a warpgroup has no rows."""
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _advance(stage, phase, STAGES)
    return stage, phase
