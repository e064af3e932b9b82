"""Grouped GEMM in Triton through pointers: any alignment, any device, also in the interpreter.

The tiles are those of `grouped_ws`: found on the device by a prefix sum over the experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _bound(offsets_ptr, at, rows):
    """Where an expert's rows begin, clamped to [0, rows] against bad offsets."""
    return tl.minimum(tl.maximum(tl.load(offsets_ptr + at), 0), rows)


@triton.jit
def _tile_ends(
    offsets_ptr, rows, num_experts, tiles_n, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr
):
    """For each expert, the number of tiles up to and including it."""
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    begin = tl.load(offsets_ptr + expert, mask=known, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=known, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), rows)
    end = tl.minimum(tl.maximum(end, 0), rows)
    return tl.cumsum((tl.maximum(end - begin, 0) + BLOCK_M - 1) // BLOCK_M * tiles_n, 0)


@triton.jit
def _tile(tile, ends, offsets_ptr, rows, BLOCK_M: tl.constexpr):
    """A tile's expert, its first row, the expert's last row, and the tile's column index.

    Row tiles of the same weights follow each other.
    """
    passed = ends <= tile
    expert = tl.sum(passed.to(tl.int32), 0)
    first = tl.max(tl.where(passed, ends, 0), 0)
    begin = _bound(offsets_ptr, expert, rows)
    end = _bound(offsets_ptr, expert + 1, rows)
    tiles_m = tl.cdiv(end - begin, BLOCK_M)
    within = tile - first
    return expert, begin + within % tiles_m * BLOCK_M, end, within // tiles_m


@triton.jit
def grouped_pointer(
    a_ptr, w_ptr, offsets_ptr, out_ptr, a_stride, w_stride, expert_stride, half, out_stride,
    rows, num_experts, n, k, tiles_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GLU: tl.constexpr, UNIT: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, n]: rows offsets[e] to offsets[e + 1] are a @ w[e]^T, or silu(gate) * up.

    The up weights are `half` behind the gate's. Strides, `half`, n and k count UNIT elements.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ends = _tile_ends(offsets_ptr, rows, num_experts, tiles_n, BLOCK_M, EXPERTS)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, begin, end, tile_n = _tile(tile, ends, offsets_ptr, rows, BLOCK_M)
        row = begin + tl.arange(0, BLOCK_M)
        column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        a_base = a_ptr + row.to(tl.int64)[:, None] * (a_stride * UNIT)
        w_base = w_ptr + expert.to(tl.int64) * (expert_stride * UNIT)
        w_base += column.to(tl.int64)[:, None] * (w_stride * UNIT)
        known = (column < n * UNIT)[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if GLU:
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, tl.cdiv(k * UNIT, BLOCK_K), num_stages=STAGES):
            at = step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (at < k * UNIT)[None, :]
            a = tl.load(a_base + at[None, :], mask=inside & (row < end)[:, None], other=0.0)
            w = tl.load(w_base + at[None, :], mask=inside & known, other=0.0)
            acc = tl.dot(a, w.T, acc, input_precision="ieee")
            if GLU:
                w = tl.load(w_base + (half * UNIT + at)[None, :], mask=inside & known, other=0.0)
                up = tl.dot(a, w.T, up, input_precision="ieee")
        if GLU:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        out = out_ptr + row.to(tl.int64)[:, None] * (out_stride * UNIT) + column[None, :]
        mask = (row < end)[:, None] & (column < n * UNIT)[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
