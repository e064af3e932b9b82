"""Gate and up of e4m3 into e4m3 on a GPU: one kernel has the bits of two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import smkern
from smkern.ops.reference.fp8 import dequantize, quantize

E4M3 = torch.float8_e4m3fn
POISON = 0x7F


def operands(m: int, width: int, k: int) -> dict[str, Tensor]:
    torch.manual_seed(m)
    a, a_scale = quantize(torch.randn(m, k, device="cuda").bfloat16(), "block")
    w, w_scale = quantize(torch.randn(2 * width, k, device="cuda").bfloat16(), "weight_block")
    return {"a": a, "w_gate_up": w, "a_scale": a_scale, "w_scale": w_scale}


def by(backend: str, x: dict[str, Tensor], width: int, **more: object) -> tuple[Tensor, Tensor]:
    """Values and scales, of scales by columns, with nothing written around the values."""
    m = x["a"].shape[0]
    frame = torch.full((m + 2, width + 32), POISON, dtype=torch.uint8, device="cuda")
    inside = frame[1 : m + 1, 16 : width + 16]
    scale = torch.full((width // 128, m), torch.nan, device="cuda").t()
    smkern.gemm_swiglu(**x, out=inside.view(E4M3), out_scale=scale, backend=backend, **more)
    found = inside.clone()
    inside.fill_(POISON)
    assert bool((frame == POISON).all())
    return found, scale


@pytest.mark.parametrize("num_sms", [5, 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "width", "k"), [(1, 128, 128), (129, 384, 640), (300, 256, 4096), (1000, 1536, 256)]
)
def test_values(m, width, k, dtype, num_sms):
    x = operands(m, width, k)
    gate_up = torch.empty(m, 2 * width, dtype=dtype, device="cuda")
    one, scale = by("own", x, width, gate_up=gate_up, num_sms=num_sms)
    two, other = by("unfused", x, width, gate_up=gate_up, num_sms=num_sms)
    assert float((one != two).float().mean()) < 0.01, "a product's last bit may differ"
    torch.testing.assert_close(scale, other, rtol=2**-7, atol=0)
    wide = dequantize(x["a"], x["a_scale"], torch.float64)
    gate, up = (wide @ dequantize(x["w_gate_up"], x["w_scale"], torch.float64).T).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    found = dequantize(one.view(E4M3), scale, torch.float64)
    assert float((found - want).norm() / want.norm()) < 0.03


def test_what_is_not_finite_spoils_its_block_alone():
    x = operands(300, 256, 256)
    x["w_scale"][1, 0] = torch.inf  # of the gate's columns 128 to 255
    values, scale = by("own", x, 256)
    assert scale.isnan().any(0).tolist() == [False, True]
    assert bool(values.view(E4M3)[:, :128].float().isfinite().all())


def test_a_graph(ladder):
    x, width = operands(300, 256, 512), 256
    want, want_scale = by("own", x, width)
    out, scale = torch.empty(300, width, device="cuda").to(E4M3), torch.empty(300, 2, device="cuda")
    partition = ladder.split(decode=16).prefill
    torch.cuda.synchronize()
    with partition.capture() as graph:
        smkern.gemm_swiglu(**x, out=out, out_scale=scale, static_weights=True)
    for _ in range(3):
        out.view(torch.uint8).fill_(POISON)
        torch.cuda.synchronize()
        partition.launch(graph)
        partition.synchronize()
        assert torch.equal(out.view(torch.uint8), want)
        assert torch.equal(scale, want_scale)
    graph.close()
