"""Grouped GEMM of e4m3 in Triton through pointers: any alignment, sm_89 and later.

The tiles are those of the bf16 kernel: found on the device by a prefix sum over the experts.
"""

import triton
import triton.language as tl

from smkern.kernels.fp8.pdl import wait
from smkern.kernels.grouped_triton import _tile, _tile_ends


@triton.jit
def fp8_grouped_pointer(
    a_ptr, w_ptr, a_scale, w_scale, offsets_ptr, out_ptr, a_stride, w_stride, expert_stride,
    out_stride, a_step, a_block_step, w_step, w_expert_step, rows, num_experts, n, half, k, tiles_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GLU: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr, EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, n]: rows offsets[e] to offsets[e + 1] are (a @ w[e]^T) * scales, or silu(gate) *
    up of them. The up weights are `half` rows behind the gate's. Strides of a and w, and k, count
    UNIT elements.

    Tiles are summed with the weights on the row side: the matrix unit of sm_90 takes 64 rows of
    e4m3, and fewer would be multiplied as fp16."""
    wait(PDL)
    ends = _tile_ends(offsets_ptr, rows, num_experts, tiles_n, BLOCK_M, EXPERTS)
    for tile in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        expert, begin, end, tile_n = _tile(tile, ends, offsets_ptr, rows, BLOCK_M)
        row = begin + tl.arange(0, BLOCK_M)
        column = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
        here = row < end
        a_base = a_ptr + row.to(tl.int64)[:, None] * (a_stride * UNIT)
        w_base = w_ptr + expert.to(tl.int64) * (expert_stride * UNIT)
        up_base = w_base + (half + column).to(tl.int64)[:, None] * (w_stride * UNIT)
        w_base += column.to(tl.int64)[:, None] * (w_stride * UNIT)
        a_rows = a_scale + row.to(tl.int64) * a_step
        w_rows = w_scale + expert.to(tl.int64) * w_expert_step
        if BLOCKS:
            up_rows = w_rows + (half + column) // 128 * w_step
            w_rows += column // 128 * w_step
        else:
            up_rows = w_rows + (half + column) * w_step
            w_rows += column * w_step
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if GLU:
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for step in tl.range(0, tl.cdiv(k * UNIT, BLOCK_K), num_stages=STAGES):
            at = step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (at < k * UNIT)[None, :]
            a = tl.load(a_base + at[None, :], mask=inside & here[:, None], other=0.0)
            w = tl.load(w_base + at[None, :], mask=inside, other=0.0)
            part = tl.dot(w, a.T)
            if BLOCKS:
                by_row = tl.load(a_rows + step * a_block_step, mask=here, other=1.0)
                part = part * (tl.load(w_rows + step)[:, None] * by_row[None, :])
            total += part
            if GLU:
                w = tl.load(up_base + at[None, :], mask=inside, other=0.0)
                part = tl.dot(w, a.T)
                if BLOCKS:
                    part = part * (tl.load(up_rows + step)[:, None] * by_row[None, :])
                up += part
        if not BLOCKS:
            by_row = tl.load(a_rows, mask=here, other=1.0)
            total = total * tl.load(w_rows)[:, None] * by_row[None, :]
            if GLU:
                up = up * tl.load(up_rows)[:, None] * by_row[None, :]
        if GLU:
            total = total / (1.0 + tl.exp(-total)) * up
        place = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        out = out_ptr + row.to(tl.int64)[:, None] * out_stride + place[None, :]
        mask = here[:, None] & (place < n)[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty).T, mask=mask)
