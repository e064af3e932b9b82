"""Persistent GEMM of e4m3 by pointers in Triton: for sm_89, and for rows of any alignment.

Whole K loops only. Tensor cores' sums go to fp32 after every 128 products, as in `gemm_ws`.
"""

import triton
import triton.language as tl

from smkern.kernels.fp8.pdl import wait
from smkern.kernels.gemm_triton import _store, _tile_coords


@triton.jit
def fp8_gemm_pointer(
    a_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, a_scale, w_scale,
    m, n, k, a_stride, w_stride, out_stride, residual_stride, a_step, a_block_step, w_step,
    tiles_m, tiles_n, group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [m, n] = act((a @ w^T) * scales + bias) + residual; strides of a and w, and k, count
    UNIT elements."""
    wait(PDL)
    steps = tl.cdiv(k * UNIT, BLOCK_K)
    at = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _tile_coords(tile, tiles_m, tiles_n, group)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        a_at = a_ptr + rows.to(tl.int64)[:, None] * (a_stride * UNIT) + at[None, :]
        w_at = w_ptr + cols.to(tl.int64)[:, None] * (w_stride * UNIT) + at[None, :]
        a_row = a_scale + rows.to(tl.int64) * a_step
        if BLOCKS:
            w_row = w_scale + (tl.minimum(cols, n - 1) // 128).to(tl.int64) * w_step
        else:
            w_row = w_scale + cols.to(tl.int64) * w_step
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            inside = (step * BLOCK_K + at < k * UNIT)[None, :]
            a = tl.load(a_at + step * BLOCK_K, mask=inside & (rows < m)[:, None], other=0.0)
            w = tl.load(w_at + step * BLOCK_K, mask=inside & (cols < n)[:, None], other=0.0)
            part = tl.dot(a, w.T)
            if BLOCKS:
                by_row = tl.load(a_row + step * a_block_step, mask=rows < m, other=1.0)
                by_col = tl.load(w_row + step)
                total += part * (by_row[:, None] * by_col[None, :])
            else:
                total += part
        if not BLOCKS:
            by_row = tl.load(a_row, mask=rows < m, other=1.0)
            by_col = tl.load(w_row, mask=cols < n, other=1.0)
            total = total * by_row[:, None] * by_col[None, :]
        _store(
            total, rows, cols, out_ptr, bias_ptr, residual_ptr, m, n, out_stride, residual_stride,
            1, False, BIAS, RESIDUAL, ACT,
        )  # fmt: skip
