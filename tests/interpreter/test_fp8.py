"""Triton kernels of e4m3 interpreted, against the plain-torch reference.

The interpreter's conversion to e4m3 is not the hardware's: some carries and subnormals are wrong.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from smkern.kernels.fp8 import gemm_triton, grouped_triton, rows_triton
from smkern.ops.reference import fp8, moe, rows
from smkern.ops.reference import gemm as reference

E4M3 = torch.float8_e4m3fn
KINDS = {"block": ("block", "weight_block"), "row": ("token", "token"), "tensor": ("tensor",) * 2}


def close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Scales to the last bits of fp32, nearly all elements to a step of e4m3."""
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=0, equal_nan=True)
    one, other = (fp8.dequantize(*x) for x in (found, wanted))
    known = wanted[1].expand(wanted[1].shape).isnan()
    assert torch.equal(found[1].isnan(), known)
    off = (one - other).abs().nan_to_num()
    least = fp8.dequantize(torch.full_like(found[0].float(), 2.0**-9).to(E4M3), wanted[1])
    near = off <= torch.maximum(other.abs() / 7, 1.01 * least).nan_to_num()
    assert float(near.float().mean()) > 0.95


def empty(wanted: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.zeros(wanted[0].shape, dtype=E4M3), torch.full_like(wanted[1], math.inf)


@pytest.mark.parametrize("blocks", [False, True])
def test_rows(blocks):
    x = torch.randn(7, 640).half()
    x[1, 3], x[2] = math.nan, 0.0
    kind = "block" if blocks else "token"
    wanted = fp8.quantize(x, kind)
    for block in (256, 1024):
        q, s = made = empty(wanted)
        steps = (s.stride(0), s.stride(1) if blocks else 0)
        rows_triton.quantize_fp8[(3,)](
            x, q, s, 80, 80, *steps, 7, H=640, BLOCK=block, BLOCKS=blocks, UNIT=8, PDL=False
        )
        close(made, wanted)
    wanted = fp8.quantize(rows.silu_and_mul(x[:, :512]), kind)
    q, s = made = empty(wanted)
    steps = (s.stride(0), s.stride(1) if blocks else 0)
    rows_triton.silu_and_mul_fp8[(2,)](
        x, s, q, 80, 32, *steps, 7, H=256, BLOCK=256, BLOCKS=blocks, UNIT=8, PDL=False
    )
    weight, residual = torch.randn(640).half(), torch.randn(7, 640).half()
    after = residual.clone()
    wanted = fp8.quantize(rows.add_rms_norm(x, after, weight), kind)
    q, s = made = empty(wanted)
    steps = (s.stride(0), s.stride(1) if blocks else 0)
    rows_triton.add_rms_norm_fp8[(2,)](
        x, residual, weight, s, q, 80, 80, 80, *steps, 7, 1e-6, H=640, BLOCK=1024, BLOCKS=blocks,
        UNIT=8, PDL=False,
    )  # fmt: skip
    torch.testing.assert_close(s, wanted[1], rtol=2e-3, atol=0, equal_nan=True)
    torch.testing.assert_close(residual, after, equal_nan=True)


def test_tiles_and_a_whole_matrix():
    x = torch.randn(200, 256).half()
    wanted = fp8.quantize(x, "weight_block")
    q, s = made = empty(wanted)
    rows_triton.quantize_tiles_fp8[(2,)](
        x, q, s, 32, 32, 2, 1, 200, H=256, BLOCK=128, UNIT=8, PDL=False
    )
    close(made, wanted)
    wanted = fp8.quantize(x, "tensor")
    q, s = made = empty(wanted)
    words = torch.zeros(2, dtype=torch.int32)
    rows_triton.largest_fp8[(3,)](x, s, words, 32, 200, H=256, BLOCK=256, UNIT=8, PDL=False)
    rows_triton.quantize_by_fp8[(3,)](x, s, q, 32, 32, 200, H=256, BLOCK=256, UNIT=8, PDL=False)
    close(made, wanted)
    assert words.tolist() == [0, 0], "left as they were found"


def test_scales_follow_their_rows():
    scale, index = torch.rand(5, 3), torch.tensor([3, 0, -1, 1, 4, 6, 2, 8, 5, 7]).int()
    out = torch.full((9, 3), math.nan)
    rows_triton.scatter_scales[(2,)](
        scale, index, out, 3, 1, 10, TOP_K=2, GROUPS=3, HIGH=4, WIDE=4, PDL=False
    )
    for choice, row in enumerate(index.tolist()):
        if row >= 0:
            assert torch.equal(out[row], scale[choice // 2])


@pytest.mark.parametrize("kind", KINDS)
def test_products(kind):
    m, n, k = 70, 200, 384
    (a, a_scale), (w, w_scale) = (
        fp8.quantize(torch.randn(count, k), of)
        for count, of in zip((m, n), KINDS[kind], strict=True)
    )
    blocks = kind == "block"
    by_row = int(kind == "row")
    steps = (*a_scale.stride(), w_scale.stride(0)) if blocks else (by_row, 0, by_row)
    out, bias = torch.full((m, n), math.nan).half(), torch.randn(n).half()
    gemm_triton.fp8_gemm_pointer[(3,)](
        a, w, out, bias, bias, a_scale, w_scale, m, n, k // 16, k // 16, k // 16, n, 0, *steps, 2,
        4, 2, BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, STAGES=3, UNIT=16, BLOCKS=blocks, BIAS=True,
        RESIDUAL=False, ACT="none", PDL=False,
    )  # fmt: skip
    want = reference.gemm(
        fp8.dequantize(a, a_scale), fp8.dequantize(w, w_scale), bias=bias, out_dtype=torch.float32
    )
    torch.testing.assert_close(out.float(), want, rtol=2e-3, atol=0.02)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:overflow")
def test_grouped_products(kind, swiglu):
    experts, columns, k = 4, 256, 384
    n = columns // (1 + swiglu)
    offsets = torch.tensor([0, 3, 3, 20, 33]).int()
    a, a_scale = fp8.quantize(torch.randn(33, k), KINDS[kind][0])
    made = [fp8.quantize(torch.randn(columns, k) * (i + 1) / 20, KINDS[kind][1]) for i in range(4)]
    w = torch.stack([q.view(torch.uint8) for q, _ in made]).view(E4M3)
    w_scale = torch.stack([scale for _, scale in made])
    blocks = kind == "block"
    steps = {"row": (1, 0, 1, columns), "tensor": (0, 0, 0, 1)}.get(kind)
    steps = steps or (*a_scale.stride(), w_scale.stride(1), w_scale.stride(0))
    out = torch.full((33, n), math.nan).half()
    grouped_triton.fp8_grouped_pointer[(3,)](
        a, w, a_scale, w_scale, offsets, out, k // 16, k // 16, columns * k // 16, n, *steps, 33,
        experts, n, n if swiglu else 0, k // 16, -(-n // 64), BLOCK_M=16, BLOCK_N=64, BLOCK_K=128,
        STAGES=3, GLU=swiglu, BLOCKS=blocks, UNIT=16, EXPERTS=32, PDL=False,
    )  # fmt: skip
    want = moe.grouped_gemm(
        fp8.dequantize(a, a_scale), fp8.dequantize(w, w_scale), offsets, swiglu=swiglu
    )
    torch.testing.assert_close(out.float(), want, rtol=2e-3, atol=0.05)
