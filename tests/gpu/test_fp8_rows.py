"""Rows to e4m3 on a GPU: the CPU's bits, what is not finite, strides, fused with norms and SiLU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import ArgumentError
from smkern.ops.reference import fp8 as reference

E4M3 = torch.float8_e4m3fn
KINDS = ("tensor", "token", "block", "weight_block")


def rows_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = (
        torch.randn(rows, columns, device="cuda")
        * torch.logspace(-4, 3, rows, device="cuda")[:, None]
    )
    x[:, ::3] *= 1e-3  # subnormals of e4m3
    return x.to(dtype)


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert torch.equal(found.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (300, 4096), (33, 12288), (130, 640)])
def test_quantising_gives_the_bits_of_the_reference(rows, columns, dtype, kind):
    x = rows_of(rows, columns, dtype)
    x[0] = 0.0
    q, scale = smkern.quantize(x, kind)
    wanted, wanted_scale = reference.quantize(x.cpu(), kind)
    assert torch.equal(scale.cpu(), wanted_scale)
    same(q, wanted)


@pytest.mark.parametrize("columns", [1, 100, 1001])
@pytest.mark.parametrize("kind", ["tensor", "token"])
def test_widths_of_no_vector(columns, kind):
    x = rows_of(37, columns + 3)[:, :columns]
    q, scale = smkern.quantize(x, kind)
    wanted, wanted_scale = reference.quantize(x.cpu(), kind)
    assert torch.equal(scale.cpu(), wanted_scale)
    same(q, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_group_alone(bad, kind):
    x = torch.ones(256, 256, device="cuda").bfloat16()
    x[1, 5] = bad
    q, scale = smkern.quantize(x, kind)
    wanted, wanted_scale = reference.quantize(x.cpu(), kind)
    assert torch.equal(q.float().isnan().cpu(), wanted.float().isnan())
    assert torch.equal(scale.isnan().cpu(), wanted_scale.isnan())
    assert bool(scale.isnan().any())


def test_a_given_scale_saturates():
    x = torch.tensor([[1000.0, -30000.0, 8.0, 0.001]], device="cuda").half()
    q, _ = smkern.quantize(x, "tensor", scale=torch.full((), 2.0, device="cuda"))
    assert q.float().tolist() == [[448.0, -448.0, 4.0, 0.0]]


def test_given_results_are_written_where_they_lie():
    x = rows_of(40, 512)
    frame = torch.full((40, 544), 0x7F, dtype=torch.uint8, device="cuda").view(E4M3)
    scales = torch.full((48, 4), math.nan, device="cuda")
    out = frame[:, 16:528], scales[:40]
    assert smkern.quantize(x, "block", out=out)[0] is out[0]
    wanted, wanted_scale = reference.quantize(x.cpu(), "block")
    same(out[0].contiguous(), wanted)
    assert torch.equal(out[1].cpu(), wanted_scale)
    assert bool(frame[:, :16].float().isnan().all())
    assert bool(frame[:, 528:].float().isnan().all())
    assert bool(scales[40:].isnan().all())


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("width", [4096, 5120, 12288, 16384])
@pytest.mark.parametrize("rows", [1, 77])
def test_fused_writers_give_the_bits_of_two_passes(rows, width, blocks):
    x, weight = rows_of(rows, width), torch.randn(width, device="cuda").bfloat16()
    residual = torch.randn(rows, width, device="cuda").bfloat16()
    kind = "block" if blocks else "token"

    def scales(columns: int) -> Tensor:
        shape = (columns // 128, rows) if blocks else (rows,)
        made = torch.full(shape, math.nan, device="cuda")
        return made.t() if blocks else made

    def compare(found: Tensor, scale: Tensor, plain: Tensor) -> None:
        q, wanted = smkern.quantize(plain, kind)
        assert torch.equal(scale, wanted)
        same(found, q)

    scale = scales(width)
    found = smkern.rms_norm(x, weight, out_scale=scale)
    compare(found, scale, smkern.rms_norm(x, weight))
    scale, mine, other = scales(width), residual.clone(), residual.clone()
    found = smkern.add_rms_norm(x, mine, weight, out_scale=scale)
    compare(found, scale, smkern.add_rms_norm(x, other, weight))
    assert torch.equal(mine, other)
    if width % 256 == 0:
        scale = scales(width // 2)
        compare(smkern.silu_and_mul(x, out_scale=scale), scale, smkern.silu_and_mul(x))


@pytest.mark.parametrize("num_sms", [1, 7, 60])
def test_budgets(num_sms):
    x = rows_of(500, 4096)
    for kind in KINDS:
        q, scale = smkern.quantize(x, kind)
        again, other = smkern.quantize(x, kind, num_sms=num_sms)
        assert torch.equal(scale, other)
        same(again, q)


def test_graphs(ladder):
    x, weight = rows_of(64, 4096), torch.ones(4096, device="cuda").bfloat16()
    partition = ladder.split(decode=16).decode
    out, scale = (
        torch.empty(64, 4096, dtype=E4M3, device="cuda"),
        torch.empty(64, 32, device="cuda"),
    )
    tensor = torch.empty(64, 4096, dtype=E4M3, device="cuda"), torch.empty(1, device="cuda")

    def run() -> None:
        smkern.rms_norm(x, weight, out_scale=scale, out=out)
        smkern.quantize(x, "tensor", out=tensor)

    torch.cuda.synchronize()
    with partition:
        run()
    partition.synchronize()
    with partition.capture() as graph:
        run()
    wanted = out.clone(), scale.clone(), tensor[0].clone(), tensor[1].clone()
    for _ in range(3):
        for y in (out, tensor[0]):
            y.view(torch.uint8).fill_(0x7F)
        scale.fill_(math.nan)
        torch.cuda.synchronize()
        partition.launch(graph)
        partition.synchronize()
        for y, z in zip((out, scale, *tensor), wanted, strict=True):
            same(y.contiguous(), z)
    graph.close()


def test_fp32_is_refused():
    with pytest.raises(ArgumentError, match=r"x is torch\.float32 on a GPU"):
        smkern.quantize(torch.ones(2, 128, device="cuda"), "token")
