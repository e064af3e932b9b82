"""The grouped GEMM of e4m3 on a GPU: values, empty and skewed experts, kinds of scales, budgets."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import ArgumentError
from smkern.kernels.fp8.grouped_launch import ScaledGroupedKernels
from smkern.ops.reference import fp8
from smkern.ops.reference import moe as reference
from smkern.tuning.fp8_grouped import ScaledGroupedProblem
from tests.gpu.compiling import compile_ahead
from tests.gpu.fp8_support import KINDS
from tests.gpu.gemm_support import capability, check_frame, framed

COUNTS = {
    "few": [1, 0, 3, 0, 0, 7, 2, 1],
    "one": [0, 0, 0, 0, 0, 0, 0, 1],
    "some": [40, 0, 31, 33, 1, 20, 64, 5],
    "skewed": [0, 0, 300, 1, 0, 5, 0, 17],
    "many": [130, 128, 0, 1, 257, 64, 127, 129],
}


WIDTHS = {
    "qwen": (2048, 768),
    "ragged": (200, 400),  # by 400 of K: the last step is cut, and rows alone have scales
    "cut-block": (200, 512),  # gated, its blocks of up are no whole tiles: by pointers
    "by-pointers": (204, 512),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if not torch.cuda.is_available():
        return
    kernels = ScaledGroupedKernels(capability())
    problem = ScaledGroupedProblem(1, 8, 8, 8)
    compile_ahead(
        variant
        for swiglu, blocks, mapped in product((False, True), repeat=3)
        for variant in kernels.variants(
            replace(problem, swiglu=swiglu, blocks=blocks, mapped=mapped)
        )
    )


def experts_of(kind: str, rows: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, a_scale = fp8.quantize(torch.randn(rows, k, device="cuda"), KINDS[kind][0])
    made = [
        fp8.quantize(torch.randn(n, k, device="cuda") * (i + 1) / k**0.5, KINDS[kind][1])
        for i in range(8)
    ]
    w = torch.stack([q.view(torch.uint8) for q, _ in made]).view(torch.float8_e4m3fn)
    return a, w, a_scale, torch.stack([scale for _, scale in made])


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", COUNTS)
def test_values(name, widths, kind, swiglu):
    counts, (n, k) = COUNTS[name], WIDTHS[widths]
    rows = sum(counts)
    if kind == "block" and k % 128:
        return  # such scales are refused
    if widths == "qwen" and swiglu:
        n, k = k, n
    a, w, a_scale, w_scale = experts_of(kind, rows, n * (1 + swiglu), k)
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    out, frame = framed(rows, n, torch.bfloat16)
    options = {"a_scale": a_scale, "w_scale": w_scale, "swiglu": swiglu}
    assert smkern.grouped_gemm(a, w, offsets, **options, out=out) is out
    want = reference.grouped_gemm(
        fp8.dequantize(a, a_scale, torch.float64), fp8.dequantize(w, w_scale, torch.float64),
        offsets, swiglu=swiglu, compute_dtype=torch.float64,
    )  # fmt: skip
    assert float((out.double() - want).norm() / want.norm()) < 0.0025
    assert float((out.double() - want).abs().max()) < 0.02 * float(want.abs().max())
    check_frame(frame, out)
    for num_sms in (7, 60):
        again = smkern.grouped_gemm(a, w, offsets, **options, num_sms=num_sms)
        assert torch.equal(again, out)


@pytest.mark.parametrize("rows", [60, 600, 6000])
def test_real_routing_with_many_experts(rows):
    """512 experts fill the search for a tile's; a third of them has no rows."""
    a, a_scale = fp8.quantize(torch.randn(rows, 256, device="cuda"), "block")
    q, scale = fp8.quantize(torch.randn(512 * 128, 256, device="cuda"), "weight_block")
    w, w_scale = q.view(512, 128, 256), scale.view(512, 1, 2)
    counts = torch.bincount(torch.randint(0, 340, (rows,)) * 3 // 2, minlength=512)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().cuda()
    found = smkern.grouped_gemm(a, w, offsets, a_scale=a_scale, w_scale=w_scale)
    want = reference.grouped_gemm(
        fp8.dequantize(a, a_scale, torch.float64), fp8.dequantize(w, w_scale, torch.float64),
        offsets, compute_dtype=torch.float64,
    )  # fmt: skip
    assert float((found.double() - want).norm() / want.norm()) < 0.0025


def test_offsets_that_cannot_be_read_nothing_outside():
    a, w, a_scale, w_scale = experts_of("block", 64, 256, 256)
    offsets = torch.tensor([-5, 3, 2, 70, 64, 64, 10**9, 64, 64], device="cuda").int()
    found = smkern.grouped_gemm(a, w, offsets, a_scale=a_scale, w_scale=w_scale)
    assert found.shape == (64, 256)
    torch.cuda.synchronize()
    with pytest.raises(ArgumentError, match=r"expert_offsets\[0\] is -5, wanted 0"):
        smkern.grouped_gemm(a, w, offsets, a_scale=a_scale, w_scale=w_scale, check=True)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(3, 2, 8), (64, 8, 128), (2000, 8, 128)])
def test_permuted_rows_are_those_of_the_tokens(tokens, top_k, experts, blocks):
    x = torch.randn(tokens, 2048, device="cuda").bfloat16()
    chosen = torch.rand(tokens, experts, device="cuda").topk(top_k, 1).indices.int()
    chosen[0, 0] = experts + 5
    count = tokens * top_k
    scale = torch.full((16, count) if blocks else (count,), math.nan, device="cuda")
    scale = scale.t() if blocks else scale
    rows, offsets, index = smkern.moe_permute(x, chosen, experts, out_scale=scale)
    plain, *wanted = smkern.moe_permute(x, chosen, experts)
    assert torch.equal(offsets, wanted[0])
    assert torch.equal(index, wanted[1])
    q, wanted_scale = smkern.quantize(plain[: count - 1], "block" if blocks else "token")
    assert torch.equal(rows[: count - 1].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(scale[: count - 1], wanted_scale)
    assert bool(scale[count - 1 :].isnan().all())


def test_permuted_rows_at_an_odd_address_are_refused():
    """Pairs are stored, and the GPU would not survive the first. The call before it is the same but
    for the address."""
    x, chosen = (
        torch.randn(4, 256, device="cuda").bfloat16(),
        torch.zeros(4, 1, device="cuda").int(),
    )
    room = torch.zeros(4 * 256 + 2, device="cuda", dtype=torch.float8_e4m3fn)
    rest = (torch.empty(2, device="cuda").int(), torch.empty(4, device="cuda").int())
    scale = torch.empty(4, device="cuda")
    for begin in (2, 1):
        rows = room[begin : begin + 1024].view(4, 256)
        with nullcontext() if begin == 2 else pytest.raises(ArgumentError, match="odd address"):
            smkern.moe_permute(x, chosen, 1, out=(rows, *rest), out_scale=scale)
    torch.cuda.synchronize()
    assert torch.equal(room[2:].view(4, 256).float(), smkern.quantize(x, "token")[0].float())


def test_a_graph(ladder):
    a, w, a_scale, w_scale = experts_of("block", 64, 512, 512)
    offsets = torch.arange(0, 72, 8, device="cuda").int()
    out = torch.empty(64, 512, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        smkern.grouped_gemm(a, w, offsets, a_scale=a_scale, w_scale=w_scale, out=out)

    partition = ladder.split(decode=16).decode
    torch.cuda.synchronize()
    with partition:
        run()
    partition.synchronize()
    want = out.clone()
    with partition.capture() as graph:
        run()
    out.fill_(math.nan)
    torch.cuda.synchronize()
    partition.launch(graph)
    partition.synchronize()
    assert torch.equal(out, want)
    graph.close()
