"""e4m3: values to it and back, products with scales, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import ArgumentError
from smkern.limits import check_fp8_capability
from smkern.ops.reference.fp8 import dequantize
from tests.ops.tensors import default_dtype

E4M3 = torch.float8_e4m3fn
PAIRS = {
    "tensor": ("tensor", "tensor"),
    "row": ("token", "token"),
    "tensor x row": ("tensor", "token"),
    "row x tensor": ("token", "tensor"),
    "block": ("block", "weight_block"),
}


def e4m3(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(E4M3)


def operands(pair: str, m: int, n: int, k: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(m + n)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    (a, a_scale), (q, w_scale) = (
        smkern.quantize(*pair) for pair in zip((x, w), PAIRS[pair], strict=True)
    )
    return {"a": a, "w": q, "a_scale": a_scale, "w_scale": w_scale}


@pytest.mark.parametrize("kind", ["tensor", "token", "block", "weight_block"])
def test_quantising_is_within_half_a_step_of_each_value(kind):
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-3, 3, 130)[:, None]
    q, scale = smkern.quantize(x, kind)
    wide = dequantize(q, scale)
    step = torch.maximum(x.abs() / 16, 2.0**-10 * dequantize(torch.ones_like(q), scale))
    assert bool(((wide - x).abs() <= 1.01 * step).all())
    assert float(q.float().abs().max()) == 448


def test_quantising_by_hand():
    x = torch.tensor([[448.0, 17.0, 2.0**-10, 1.01 * 2.0**-10, -19.0, 0.0]])
    q, scale = smkern.quantize(x, "tensor")
    assert scale.tolist() == [1.0]
    # 17 lies between 16 and 18, 19 between 18 and 20: ties to even; 2^-9 is the smallest subnormal
    assert q.float().tolist() == [[448.0, 16.0, 0.0, 2.0**-9, -20.0, 0.0]]


def test_a_given_scale_saturates():
    q, scale = smkern.quantize(
        torch.tensor([[1000.0, -1e30, 8.0]]), "tensor", scale=torch.tensor([2.0])
    )
    assert q.float().tolist() == [[448.0, -448.0, 4.0]]
    assert scale.tolist() == [2.0]


def test_rows_of_zeros_and_of_almost_nothing_have_scale_1():
    x = torch.tensor([[0.0, -0.0], [2.0**-101, -(2.0**-120)], [2.0**-99, 0.0]])
    q, scale = smkern.quantize(x, "token")
    assert torch.equal(scale, torch.tensor([1.0, 1.0, 2.0**-99 / 448]))
    assert q.float().tolist() == [[0.0, 0.0], [0.0, 0.0], [448.0, 0.0]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("kind", "spoiled"), [("token", (1, slice(None))), ("block", (1, 0))])
def test_what_is_not_finite_spoils_its_group_alone(bad, kind, spoiled):
    x = torch.ones(3, 256)
    x[1, 5] = bad
    q, scale = smkern.quantize(x, kind)
    expected = torch.zeros(3, 2, dtype=torch.bool)
    expected[spoiled] = True
    assert torch.equal(q.float().isnan().view(3, 2, 128).all(2), expected)
    assert torch.equal(scale.isnan().view(3, -1).expand(3, 2), expected)
    w = torch.ones(128, 256).to(E4M3)
    w_scale = torch.ones(1, 2) if kind == "block" else torch.ones(1)
    y = smkern.gemm(q, w, a_scale=scale, w_scale=w_scale)
    assert y.isnan().all(1).tolist() == [False, True, False]


def test_products_by_hand():
    a = torch.tensor([[1.0, 2.0], [0.0, 4.0]]).to(E4M3)
    w = torch.tensor([[1.0, 1.0], [3.0, 0.0], [0.5, 1.0]]).to(E4M3)
    y = smkern.gemm(
        a, w, a_scale=torch.tensor([2.0, 0.5]), w_scale=torch.tensor([[1.0], [10.0], [4.0]])
    )
    assert y.dtype is torch.bfloat16
    assert y.tolist() == [[6.0, 60.0, 20.0], [2.0, 0.0, 8.0]]


def test_blocks_by_hand():
    a, w = torch.ones(2, 256).to(E4M3), torch.ones(129, 256).to(E4M3)
    a_scale = torch.tensor([[1.0, 2.0], [3.0, 0.25]])
    w_scale = torch.tensor([[1.0, 0.5], [0.125, 4.0]])
    y = smkern.gemm(a, w, a_scale=a_scale, w_scale=w_scale, out_dtype=torch.float32)
    assert y[:, 0].tolist() == [256.0, 400.0]
    assert y[:, 127].tolist() == [256.0, 400.0]
    assert y[:, 128].tolist() == [16.0 + 1024.0, 48.0 + 128.0]
    lying = torch.empty(2, 2).t().copy_(a_scale)
    again = smkern.gemm(a, w, a_scale=lying, w_scale=w_scale, out_dtype=torch.float32)
    assert torch.equal(again, y)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"batch_invariant": True}])
def test_a_product_is_that_of_the_values(pair, options):
    given = operands(pair, 5, 200, 256)
    bias, residual = torch.randn(200).bfloat16(), torch.randn(5, 200).bfloat16()
    y = smkern.gemm(**given, bias=bias, residual=residual, **options)
    a, w = (dequantize(given[x], given[f"{x}_scale"], torch.float64) for x in ("a", "w"))
    wanted = a @ w.T + bias.double()
    if "activation" in options:
        wanted = torch.nn.functional.silu(wanted)
    wanted += residual.double()
    assert torch.allclose(y.double(), wanted, rtol=2**-8, atol=1e-4)
    assert smkern.gemm(**given, out_dtype=torch.float16).dtype is torch.float16
    out = torch.full((5, 200), math.nan)
    assert smkern.gemm(**given, out=out) is out
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("pair", PAIRS)
def test_swiglu_and_grouped_products_are_of_the_values(pair):
    given = operands(pair, 6, 256, 128)
    a, w = (dequantize(given[x], given[f"{x}_scale"]) for x in ("a", "w"))
    gate, up = (a @ w.T).chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    swiglu = {"w_gate_up" if name == "w" else name: x for name, x in given.items()}
    y = smkern.gemm_swiglu(**swiglu)
    assert torch.allclose(y.float(), wanted, rtol=2**-8, atol=1e-3)
    stacked = {
        **given,
        "w": torch.stack([given["w"].float(), -given["w"].float()]).to(E4M3),
        "w_scale": torch.stack([given["w_scale"], 2 * given["w_scale"]]),
    }
    offsets = torch.tensor([0, 2, 6]).int()
    grouped = smkern.grouped_gemm(**stacked, expert_offsets=offsets, out_dtype=torch.float32)
    product = a @ w.T
    assert torch.allclose(grouped[:2], product[:2], atol=1e-4)
    assert torch.allclose(grouped[2:], -2 * product[2:], atol=1e-4)


@pytest.mark.parametrize("blocks", [False, True])
def test_what_writes_e4m3_is_the_quantised_row(blocks):
    x, weight = torch.randn(5, 256).bfloat16(), torch.randn(256).bfloat16()
    kind = "block" if blocks else "token"

    def scale(columns: int) -> Tensor:
        return torch.full((5, columns // 128) if blocks else (5,), math.nan)

    calls: list[tuple[Any, Tensor, Tensor]] = [
        (lambda **more: smkern.rms_norm(x, weight, **more), smkern.rms_norm(x, weight), scale(256)),
        (lambda **more: smkern.silu_and_mul(x, **more), smkern.silu_and_mul(x), scale(128)),
        (
            lambda **more: smkern.add_rms_norm(x, x.clone(), weight, **more),
            smkern.add_rms_norm(x, x.clone(), weight),
            scale(256),
        ),
    ]
    for call, plain, written in calls:
        q, wanted = smkern.quantize(plain, kind)
        out = torch.empty(q.shape, dtype=E4M3)
        assert call(out_scale=written, out=out) is out
        assert torch.equal(out.float(), q.float())
        assert torch.equal(written, wanted)


OPS = torch.ops.smkern


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_opcheck():
    a, w = e4m3(3, 256), e4m3(256, 256)
    one, x = torch.ones(1), torch.randn(3, 256).bfloat16()
    rows, weight = torch.empty(3), torch.ones(256).bfloat16()
    products: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (OPS.scaled_gemm, (a, w, one, one), {"out_dtype": torch.float16}),
        (OPS.scaled_gemm_swiglu, (a, w, one, one), {}),
        (
            OPS.scaled_grouped_gemm,
            (a, w[None], one, one, torch.tensor([0, 3]).int()),
            {"swiglu": True},
        ),
    ]
    writers: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (OPS.quantize, (x, "block"), {}),
        (OPS.quantize_by, (x, one), {}),
        (OPS.scaled_rms_norm, (x, weight, rows), {}),
        (OPS.scaled_add_rms_norm, (x, x.clone(), weight, rows), {}),
        (OPS.scaled_silu_and_mul, (x, rows), {}),
    ]
    given = (a, w, one, one, rows)
    gate_up = {"gate_up": torch.empty(3, 256).bfloat16()}
    products += [
        (OPS.quantized_gemm_swiglu, given, {}),
        (OPS.quantized_gemm_swiglu, given, gate_up),
    ]
    for op, given, options in (*products, *writers):
        torch.library.opcheck(op.default, given, options, test_utils="test_faketensor")
    for op, given, options in writers:  # torch compares arguments by products e4m3 does not have
        torch.library.opcheck(op.default, given, options, test_utils="test_schema")


def refused(message: str, call: Any, **given: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(**given)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_scale": None}, "w_scale is None.*both scales"),
        ({"a_scale": None}, "a_scale is None.*both scales"),
        ({"a": torch.ones(4, 256).bfloat16()}, "a is torch.bfloat16, and scales.*smkern.quantize"),
        ({"w": torch.ones(300, 256).to(torch.float8_e5m2)}, "w is torch.float8_e5m2.*e5m2"),
        ({"a_scale": ONE.double()}, "a_scale is torch.float64, wanted torch.float32"),
        ({"w_scale": 1.0}, "w_scale is float, not a torch.Tensor"),
        ({"a_scale": torch.ones(3)}, r"a_scale has shape \[3\], wanted one number or \[4\]"),
        ({"w_scale": torch.ones(4)}, r"w_scale has shape \[4\], wanted one number or \[300\]"),
        ({"a_scale": torch.ones(8)[::2]}, r"a_scale has strides \(2,\).*contiguous"),
        ({"a_scale": ONE.to("meta")}, "a_scale is on meta, a on cpu"),
        ({"w_scale": torch.ones(3, 2)}, r"a_scale has shape \[1\], wanted \[4, 2\]"),
        ({"w_scale": torch.ones(2, 3)}, r"w_scale has shape \[2, 3\].*wanted \[3, 2\]"),
        ({"w_scale": torch.ones(2, 3).t()}, r"strides \(1, 3\), wanted \[3, 2\] without gaps"),
        (
            {"w_scale": torch.ones(3, 2), "a_scale": torch.ones(8, 4)[::2, ::2]},
            r"a_scale has strides \(8, 2\)",
        ),
        (
            {"a": e4m3(4, 200), "w": e4m3(300, 200), "w_scale": torch.ones(3, 2)},
            "K is 200: block scales want K to be a multiple of 128",
        ),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8: use torch.bfloat16"),
        ({"bias": torch.ones(300).half()}, "bias is torch.float16, the result torch.bfloat16"),
        ({"out": torch.ones(4, 300).to(E4M3)}, "out_dtype is torch.float8_e4m3fn"),
        ({"check": True, "a_scale": -ONE}, r"a_scale\[0\] is -1.0: scales are finite and above 0"),
        ({"check": True, "w_scale": ONE / 0}, r"w_scale\[0\] is inf"),
        ({"check": True, "w_scale": torch.zeros(())}, "w_scale is 0.0"),
    ],
)
def test_refused(changes, message):
    given = {"a": e4m3(4, 256), "w": e4m3(300, 256), "a_scale": ONE, "w_scale": ONE}
    refused(message, smkern.gemm, **given | changes)


def test_refused_elsewhere():
    refused("a is torch.float8_e4m3fn and has no scales", smkern.gemm, a=e4m3(1, 16), w=e4m3(1, 16))
    x = torch.ones(2, 200)
    refused("kind='row': use one of", smkern.quantize, x=x, kind="row")
    refused("kind='block' wants a multiple of 128", smkern.quantize, x=x, kind="block")
    refused("scale is given with kind='token'", smkern.quantize, x=x, kind="token", scale=ONE)
    refused("scale has shape", smkern.quantize, x=x, kind="tensor", scale=torch.ones(2))
    norm = {"x": x, "weight": torch.ones(200)}
    refused(r"out_scale has shape \[3\]", smkern.rms_norm, **norm, out_scale=torch.ones(3))
    refused("out_scale is torch.float16", smkern.rms_norm, **norm, out_scale=torch.ones(2).half())
    refused("the result has 200", smkern.rms_norm, **norm, out_scale=torch.ones(2, 1))


@pytest.mark.parametrize("pair", ["row", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gate_and_up_into_e4m3_are_two_steps(dtype, pair):
    x = operands(pair, 5, 512, 256)
    x["w_gate_up"] = x.pop("w")
    shape = (5, 2) if pair == "block" else (5,)
    scale, want_scale = torch.full(shape, math.nan), torch.empty(shape)
    gate_up = torch.empty(5, 512, dtype=dtype)
    found = smkern.gemm_swiglu(**x, out_scale=scale, gate_up=gate_up)
    product = smkern.gemm(x["a"], x["w_gate_up"], a_scale=x["a_scale"], w_scale=x["w_scale"],
                          out_dtype=dtype)  # fmt: skip
    want = smkern.silu_and_mul(product, out_scale=want_scale)
    assert found.dtype is E4M3
    assert torch.equal(found.float(), want.float())
    assert torch.equal(scale, want_scale)
    out = torch.empty(5, 256).to(E4M3)
    same = smkern.gemm_swiglu(**x, out_scale=scale, gate_up=gate_up, out=out, batch_invariant=True)
    assert same is out


def test_gate_and_up_into_e4m3_refuse():
    x = operands("block", 5, 512, 256)
    x["w_gate_up"] = x.pop("w")
    swiglu, scale = smkern.gemm_swiglu, torch.empty(5, 2)
    refused("gate_up is given without out_scale", swiglu, **x, gate_up=torch.empty(5, 512))
    refused("out_dtype=torch.float16 with out_scale", swiglu, **x, out_scale=scale,
            out_dtype=torch.float16)  # fmt: skip
    refused("wanted .5, 512", swiglu, **x, out_scale=scale, gate_up=torch.empty(5, 256))
    refused("contiguous one", swiglu, **x, out_scale=scale, gate_up=torch.empty(5, 520)[:, :512])
    refused("it takes gate and up", swiglu, **x, out_scale=scale, gate_up=e4m3(5, 512))
    refused("one for 128 columns", swiglu, **x, out_scale=torch.empty(5, 4))
    alone = x | {"w_scale": None}
    refused("w_scale is None", swiglu, **alone, out_scale=scale)


def test_gpus_without_e4m3_are_refused_by_name():
    check_fp8_capability(89)
    with pytest.raises(smkern.errors.DeviceError, match=r"compute capability 8\.6 has no e4m3"):
        check_fp8_capability(86)


def test_calls_to_come_are_checked():
    calls = smkern.Fp8Calls(
        shapes=[(512, 256)], swiglu=[(128, 256)], experts=[(4, 128, 256, True)],
        permuted=[(256, 4, 2)], blocks=True, hidden=[256], added=[256], gated=[128],
        quantized=[256], static=[100], quantized_swiglu=[(384, 256)],
    )  # fmt: skip
    assert {op.name for op, _ in calls.calls(torch.device("meta"), True)} == {
        "scaled_rms_norm", "scaled_add_rms_norm", "scaled_silu_and_mul", "quantize", "quantize_by",
        "scaled_grouped_gemm", "scaled_moe_permute",
    }  # fmt: skip
    assert [(p.n, p.epilogue.key) for p in calls.problems(True)] == [
        (512, "none"), (256, "none"), (768, "none"), (768, "swiglu"),
    ]  # fmt: skip
    refused("K is a multiple of 128", smkern.Fp8Calls, shapes=[(512, 200)], blocks=True)
    refused(r"give \(N, K\)", smkern.Fp8Calls, shapes=[(512, 0)])
    refused("max_m=0", smkern.Fp8Calls, shapes=[(512, 128)], max_m=0)
    refused("wants a multiple of 128", smkern.Fp8Calls, quantized=[100], blocks=True)


def test_scales_of_calls_to_come_are_fp32_whatever_the_default_dtype_is():
    """Engines load models with the model's dtype as the default, and warm up meanwhile."""
    with default_dtype(torch.bfloat16):
        calls = smkern.Fp8Calls(static=[256], experts=[(4, 128, 256, True)], permuted=[(256, 4, 2)])
    assert calls.static == [256]


@pytest.mark.parametrize("blocks", [False, True])
def test_permuted_rows_are_those_of_the_tokens(blocks):
    x, experts = torch.randn(3, 256), torch.tensor([[2, 0], [0, 9], [1, 2]]).int()
    scale = torch.empty((6, 2) if blocks else (6,))
    rows, offsets, index = smkern.moe_permute(x, experts, 3, out_scale=scale)
    plain = smkern.moe_permute(x, experts, 3)
    assert torch.equal(offsets, plain[1])
    assert torch.equal(index, plain[2])
    q, wanted = smkern.quantize(plain[0][:5], "block" if blocks else "token")
    assert torch.equal(rows[:5].float(), q.float())
    assert torch.equal(scale[:5], wanted)
    refused("both must be even", smkern.moe_permute, x=x[:, :255], experts=experts, num_experts=3,
            out_scale=torch.empty(6))  # fmt: skip
