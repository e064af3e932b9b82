"""Rows to e4m3 in Triton: quantising, and norms and SiLU times up that write it in their pass.

A scale is the largest magnitude of its group / 448, and elements are multiplied by its inverse, one
instruction where a division is several. Magnitudes are compared as bits, of which NaN's are the
largest, so that what is not finite is seen; the conversion saturates and keeps NaN. Values are
rounded to the rows' dtype before, as where the row is written and quantised in two passes.

Strides of rows count UNIT elements. PDL as in `smkern.kernels.rows_triton`, whose sums these are.
"""

import triton
import triton.language as tl

from smkern.kernels.fp8 import rows_math as _math
from smkern.kernels.fp8.pdl import wait
from smkern.kernels.rows_triton import _columns, _fetch, _part, _square_sum

SHARED_BY = tl.constexpr(128)
"""Columns of a block's scale."""

_magnitude = triton.jit(_math._magnitude)
_scale_of = triton.jit(_math._scale_of)
_inverse = triton.jit(_math._inverse)


@triton.jit
def _store_blocks(x, out_at, scale_at, block_step, column, first, mask, H: tl.constexpr):
    """Quantise pieces [P, C] of a row from column `first` on, C a multiple of 128; store both."""
    P: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    EACH: tl.constexpr = C // SHARED_BY
    groups = tl.reshape(x, [P, EACH, SHARED_BY])
    scale = _scale_of(tl.max(_magnitude(groups), 2))
    q = tl.reshape(groups * _inverse(scale)[:, :, None], [P, C])
    tl.store(out_at + column, q.to(tl.float8e4nv), mask=mask)
    block = tl.arange(0, P)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    block += first // SHARED_BY
    at = scale_at + block * block_step
    tl.store(at, scale, mask=block < H // SHARED_BY)


@triton.jit
def _store_row(x, scale, out_at, column, mask):
    """Store elements by one scale."""
    tl.store(out_at + column, (x * _inverse(scale)).to(tl.float8e4nv), mask=mask)


@triton.jit
def _rows_of(row, step, UNIT: tl.constexpr):
    """Elements to a row: strides are 64 bits wide, so this is."""
    return row * step * UNIT


@triton.jit
def _values(x_ptr, at, column, mask, H: tl.constexpr, GLU: tl.constexpr):
    """Elements of a row in fp32, rounded to its dtype: x, or silu(gate) * up."""
    x = tl.load(x_ptr + at + column, mask=mask, other=0.0)
    if GLU:
        up = tl.load(x_ptr + at + H + column, mask=mask, other=0.0).to(tl.float32)
        gate = x.to(tl.float32)
        x = (gate / (1.0 + tl.exp(-gate)) * up).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _quantize(
    x_ptr, out_ptr, scale_ptr, x_step, out_step, scale_step, block_step, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GLU: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of H elements with a scale a row, or for 128 columns where BLOCKS."""
    PIECES: tl.constexpr = (H + BLOCK - 1) // BLOCK
    wait(PDL)
    if BLOCKS:
        for item in range(tl.program_id(0), rows * PIECES, tl.num_programs(0)):
            row = item // PIECES
            first = (item % PIECES) * BLOCK
            column = first + tl.arange(0, BLOCK)[None, :]
            mask = column < H
            x = _values(x_ptr, _rows_of(row, x_step, UNIT), column, mask, H, GLU)
            out_at = out_ptr + _rows_of(row, out_step, UNIT)
            scale_at = scale_ptr + row * scale_step
            _store_blocks(x, out_at, scale_at, block_step, column, first, mask, H)
    else:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            x_at = _rows_of(row, x_step, UNIT)
            out_at = out_ptr + _rows_of(row, out_step, UNIT)
            if PIECES == 1:
                column = tl.arange(0, BLOCK)
                mask = column < H
                x = _values(x_ptr, x_at, column, mask, H, GLU)
                scale = _scale_of(tl.max(_magnitude(x), 0))
                _store_row(x, scale, out_at, column, mask)
            else:
                most = tl.zeros([BLOCK], tl.int32)
                for piece in range(PIECES):
                    column = piece * BLOCK + tl.arange(0, BLOCK)
                    x = _values(x_ptr, x_at, column, column < H, H, GLU)
                    most = tl.maximum(most, _magnitude(x))
                scale = _scale_of(tl.max(most, 0))
                for piece in range(PIECES):
                    column = piece * BLOCK + tl.arange(0, BLOCK)
                    x = _values(x_ptr, x_at, column, column < H, H, GLU)
                    _store_row(x, scale, out_at, column, column < H)
            tl.store(scale_ptr + row * scale_step, scale)


@triton.jit
def quantize_fp8(
    x_ptr, out_ptr, scale_ptr, x_step, out_step, scale_step, block_step, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out, scales = x in e4m3, by rows or by 128 columns of them."""
    _quantize(
        x_ptr, out_ptr, scale_ptr, x_step, out_step, scale_step, block_step, rows, H, BLOCK,
        BLOCKS, False, UNIT, PDL,
    )  # fmt: skip


@triton.jit
def silu_and_mul_fp8(
    x_ptr, scale_ptr, out_ptr, x_step, out_step, scale_step, block_step, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out, scales = silu(x[:, :H]) * x[:, H:] in e4m3."""
    _quantize(
        x_ptr, out_ptr, scale_ptr, x_step, out_step, scale_step, block_step, rows, H, BLOCK,
        BLOCKS, True, UNIT, PDL,
    )  # fmt: skip


@triton.jit
def quantize_tiles_fp8(
    x_ptr, out_ptr, scale_ptr, x_step, out_step, scale_step, block_step, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out, scales = x in e4m3, a scale for BLOCK rows by BLOCK columns."""
    ACROSS: tl.constexpr = H // BLOCK
    wait(PDL)
    tiles = tl.cdiv(rows, BLOCK) * ACROSS
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        high = tile // ACROSS
        row = high * BLOCK + tl.arange(0, BLOCK)
        column = (tile % ACROSS) * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (row < rows)[:, None]
        x_at = x_ptr + _rows_of(row, x_step, UNIT)[:, None] + column
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        scale = _scale_of(tl.max(tl.max(_magnitude(x), 1), 0))
        out_at = out_ptr + _rows_of(row, out_step, UNIT)[:, None]
        _store_row(x, scale, out_at, column, mask)
        at = scale_ptr + high * scale_step
        tl.store(at + (tile % ACROSS) * block_step, scale)


@triton.jit
def quantize_by_fp8(
    x_ptr, scale_ptr, out_ptr, x_step, out_step, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x / scale in e4m3."""
    PIECES: tl.constexpr = (H + BLOCK - 1) // BLOCK
    wait(PDL)
    scale = tl.load(scale_ptr)
    for item in range(tl.program_id(0), rows * PIECES, tl.num_programs(0)):
        row = item // PIECES
        column = (item % PIECES) * BLOCK + tl.arange(0, BLOCK)
        mask = column < H
        x = _values(x_ptr, _rows_of(row, x_step, UNIT), column, mask, H, False)
        _store_row(x, scale, out_ptr + _rows_of(row, out_step, UNIT), column, mask)


@triton.jit
def largest_fp8(
    x_ptr, scale_ptr, workspace, x_step, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The scale of a whole matrix. Of the workspace's two words, one counts CTAs and one holds the
    largest magnitude; the last CTA to arrive writes the scale and leaves both at zero."""
    PIECES: tl.constexpr = (H + BLOCK - 1) // BLOCK
    wait(PDL)
    most = tl.zeros([BLOCK], tl.int32)
    for item in range(tl.program_id(0), rows * PIECES, tl.num_programs(0)):
        row = item // PIECES
        column = (item % PIECES) * BLOCK + tl.arange(0, BLOCK)
        x = _values(x_ptr, _rows_of(row, x_step, UNIT), column, column < H, H, False)
        most = tl.maximum(most, _magnitude(x))
    tl.atomic_max(workspace + 1, tl.max(most, 0), sem="relaxed", scope="gpu")
    arrived = tl.atomic_add(workspace, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        bits = tl.atomic_xchg(workspace + 1, 0, sem="acq_rel", scope="gpu")
        tl.store(scale_ptr, _scale_of(bits))
        tl.store(workspace, 0)


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, out_ptr, x_step, residual_step, out_step,
    scale_step, block_step, rows, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ADD: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = BLOCK // 256
    column = _columns(0, PIECES)
    mask = column < H
    if PDL:
        _fetch(weight_ptr, H, BLOCK)
    wait(PDL)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x_at = x_ptr + _rows_of(row, x_step, UNIT)
        residual_at = residual_ptr + _rows_of(row, residual_step, UNIT)
        x = _part(x_at + column, residual_at + column, mask, ADD)
        by = tl.rsqrt(tl.fma(_square_sum(x).to(tl.float32), 1.0 / H, eps))
        y = (x * by * weight.to(tl.float32)).to(x_ptr.dtype.element_ty).to(tl.float32)
        out_at = out_ptr + _rows_of(row, out_step, UNIT)
        scale_at = scale_ptr + row * scale_step
        if BLOCKS:
            _store_blocks(y, out_at, scale_at, block_step, column, 0, mask, H)
        else:
            scale = _scale_of(tl.max(tl.max(_magnitude(y), 1), 0))
            _store_row(y, scale, out_at, column, mask)
            tl.store(scale_at, scale)


@triton.jit
def rms_norm_fp8(
    x_ptr, weight_ptr, scale_ptr, out_ptr, x_step, out_step, scale_step, block_step, rows, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out, scales = x / sqrt(mean(x²) + eps) * weight in e4m3."""
    _norm(
        x_ptr, x_ptr, weight_ptr, scale_ptr, out_ptr, x_step, x_step, out_step, scale_step,
        block_step, rows, eps, H, BLOCK, BLOCKS, False, UNIT, PDL,
    )  # fmt: skip


@triton.jit
def add_rms_norm_fp8(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, out_ptr, x_step, residual_step, out_step,
    scale_step, block_step, rows, eps,
    H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """residual += x, rounded; out, scales = the norm of the sum in e4m3."""
    _norm(
        x_ptr, residual_ptr, weight_ptr, scale_ptr, out_ptr, x_step, residual_step, out_step,
        scale_step, block_step, rows, eps, H, BLOCK, BLOCKS, True, UNIT, PDL,
    )  # fmt: skip


@triton.jit
def scatter_scales(
    scale_ptr, index_ptr, out_ptr, out_step, block_step, choices,
    TOP_K: tl.constexpr, GROUPS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[index[c]] = scale[c // TOP_K] for each choice that has a row; GROUPS scales a row."""
    wait(PDL)
    group = tl.arange(0, WIDE)[None, :]
    for first in range(tl.program_id(0) * HIGH, choices, tl.num_programs(0) * HIGH):
        choice = first + tl.arange(0, HIGH)
        row = tl.load(index_ptr + choice, mask=choice < choices, other=-1)
        mask = (row >= 0)[:, None] & (group < GROUPS)
        value = tl.load(scale_ptr + (choice // TOP_K)[:, None] * GROUPS + group, mask=mask)
        tl.store(out_ptr + row[:, None] * out_step + group * block_step, value, mask=mask)
