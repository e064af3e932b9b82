"""RMS norm, add and RMS norm, SiLU-and-multiply, and embedding rows: one pass each, in Triton.

A row is cut into pieces of WHOLE elements, 16 bytes for each lane of a warp. A norm holds all of a
row's pieces in registers, as two powers of two, so that there is little padding. One warp sums a
piece, in fp32 and in a fixed order; the pieces of a row are added in fp64, which is exact except
for pieces 2^23 times smaller than the largest. So a row's bits do not depend on the CTA's warps. A
CTA takes every num_programs-th item.

Row strides are 64 bits wide, so offsets are too.

With PDL the launch may begin before the previous kernel has ended: only parameters are read before
`gdc_wait`, and nothing is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WHOLE = tl.constexpr(256)
"""Elements of a piece: 32 lanes of 16 bytes."""


@triton.jit
def _wait(PDL: tl.constexpr):
    """Let the next launch begin, and wait for the previous one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _fetch(weight_ptr, H: tl.constexpr, PADDED: tl.constexpr):
    """Prefetch H weights (PADDED to a power of two) into L2, in sectors of 32 bytes.

    It reads no data, so it need not wait: a step's weights are cold, and arrive before the previous
    kernel has ended.
    """
    SECTOR: tl.constexpr = 256 // weight_ptr.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(tl.arange(0, PADDED // SECTOR) * SECTOR, H - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [(weight_ptr + at).to(tl.int64)], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _columns(FIRST: tl.constexpr, PIECES: tl.constexpr):
    """Columns [PIECES, WHOLE] of a row's pieces from the FIRST on."""
    piece = FIRST + tl.arange(0, PIECES)
    return piece[:, None] * WHOLE + tl.arange(0, WHOLE)[None, :]


@triton.jit
def _square_sum(x):
    """Sum of squares of pieces [PIECES, WHOLE], in fp64."""
    return tl.sum(tl.sum(x * x, 1).to(tl.float64), 0)


@triton.jit
def _part(x_at, residual_at, mask, ADD: tl.constexpr):
    """Pieces of a row in fp32, the residual added, rounded and written back."""
    x = tl.load(x_at, mask=mask, other=0.0)
    if ADD:
        total = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)
        x = total.to(x.dtype)
        tl.store(residual_at, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_step, residual_step, out_step, rows, eps,
    H: tl.constexpr, PIECES: tl.constexpr, REST: tl.constexpr, ADD: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm `rows` of H elements, in PIECES and REST pieces, masked past H.

    EARLY: the weights are loaded once, together with the first row, and kept.
    """
    first = _columns(0, PIECES)
    second = _columns(PIECES, max(REST, 1))
    one = first < H
    two = second < H
    if PDL:
        _fetch(weight_ptr, H, (2 if REST else 1) * PIECES * WHOLE)
    _wait(PDL)
    if EARLY:
        first_weight = tl.load(weight_ptr + first, mask=one, other=0.0)
        if REST:
            second_weight = tl.load(weight_ptr + second, mask=two, other=0.0)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x_at = x_ptr + row * x_step * UNIT
        residual_at = residual_ptr + row * residual_step * UNIT
        out_at = out_ptr + row * out_step * UNIT
        x = _part(x_at + first, residual_at + first, one, ADD)
        total = _square_sum(x)
        if REST:
            y = _part(x_at + second, residual_at + second, two, ADD)
            total += _square_sum(y)
        if not EARLY:
            first_weight = tl.load(weight_ptr + first, mask=one, other=0.0)
            if REST:
                second_weight = tl.load(weight_ptr + second, mask=two, other=0.0)
        scale = tl.rsqrt(tl.fma(total.to(tl.float32), 1.0 / H, eps))
        kind = out_ptr.dtype.element_ty
        x = x * scale * first_weight.to(tl.float32)
        tl.store(out_at + first, x.to(kind), mask=one)
        if REST:
            y = y * scale * second_weight.to(tl.float32)
            tl.store(out_at + second, y.to(kind), mask=two)


@triton.jit
def rms_norm_rows(
    x_ptr, weight_ptr, out_ptr, x_step, out_step, rows, eps,
    H: tl.constexpr, PIECES: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x / sqrt(mean(x²) + eps) * weight; row strides count UNIT elements."""
    _norm(
        x_ptr, x_ptr, weight_ptr, out_ptr, x_step, x_step, out_step, rows, eps, H, PIECES, REST,
        False, STAGES, EARLY, UNIT, PDL,
    )  # fmt: skip


@triton.jit
def add_rms_norm_rows(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_step, residual_step, out_step, rows, eps,
    H: tl.constexpr, PIECES: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual += x, rounded; out is the norm of the sum."""
    _norm(
        x_ptr, residual_ptr, weight_ptr, out_ptr, x_step, residual_step, out_step, rows, eps, H,
        PIECES, REST, True, STAGES, EARLY, UNIT, PDL,
    )  # fmt: skip


@triton.jit
def silu_and_mul_rows(
    x_ptr, out_ptr, x_step, out_step, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, H] = silu(x[:, :H]) * x[:, H:]; an item is BLOCK columns of a row."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    _wait(PDL)
    items = rows * BLOCKS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // BLOCKS
        column = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        mask = column < H
        where = x_ptr + row * x_step * UNIT + column
        gate = tl.load(where, mask=mask, other=0.0)
        up = tl.load(where + H, mask=mask, other=0.0).to(tl.float32)
        gate = gate.to(tl.float32)
        y = gate / (1.0 + tl.exp(-gate)) * up
        kind = out_ptr.dtype.element_ty
        tl.store(out_ptr + row * out_step * UNIT + column, y.to(kind), mask=mask)


@triton.jit
def embedding_rows(
    ids_ptr, table_ptr, out_ptr, ids_step, table_step, out_step, rows, table_rows,
    H: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, H] = table[ids], zeros for an id outside it; an item is BLOCK columns of a row."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    _wait(PDL)
    items = rows * BLOCKS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row = item // BLOCKS
        column = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        mask = column < H
        token = tl.load(ids_ptr + row * ids_step).to(tl.int64)
        inside = (token >= 0) & (token < table_rows)
        x = tl.load(table_ptr + token * table_step * UNIT + column, mask=mask & inside, other=0.0)
        tl.store(out_ptr + row * out_step * UNIT + column, x, mask=mask)
