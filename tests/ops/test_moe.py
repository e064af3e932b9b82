"""The experts' operators on the host: values, what is refused, torch.library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import ArgumentError, BudgetError
from tests.ops.tensors import ints, rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def layer(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, *, renormalize: bool
) -> Tensor:
    """A mixture of experts by the operators."""
    weights, experts = smkern.topk_softmax(x @ router.T, top_k, renormalize=renormalize)
    moved, offsets, index = smkern.moe_permute(x, experts, router.shape[0])
    gated = smkern.grouped_gemm(moved, gate_up, offsets, swiglu=True)
    return smkern.moe_unpermute(smkern.grouped_gemm(gated, down, offsets), index, weights)


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_layer_is_hugging_faces(renormalize: bool) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = pytest.importorskip("transformers").Qwen3MoeConfig(
        hidden_size=48, moe_intermediate_size=24, num_experts=10, num_experts_per_tok=3,
        norm_topk_prob=renormalize,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = qwen.Qwen3MoeSparseMoeBlock(config).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.2)
        x = rows(29, 48, FP32)
        wanted = block(x[None])[0]
        weights = block.experts.gate_up_proj, block.experts.down_proj
        found = layer(x, block.gate.weight, *weights, 3, renormalize=renormalize)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_routing() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    weights, experts = smkern.topk_softmax(logits, 3, renormalize=False)
    assert experts.tolist() == [[1, 2, 0], [0, 1, 2]]
    torch.testing.assert_close(weights[1], torch.full((3,), 0.25))
    out = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int32)
    assert smkern.topk_softmax(logits.half(), 3, out=out)[0] is out[0]
    assert out[1].tolist() == experts.tolist()
    assert smkern.topk_softmax(logits[:0], 2)[1].shape == (0, 2)
    bad, found = smkern.topk_softmax(torch.tensor([[0.0, float("nan"), 1.0]]), 2)
    assert bad.isnan().all()
    assert ((found >= 0) & (found < 3)).all()


def test_permutation_is_stable_and_skips_what_is_no_expert() -> None:
    x = torch.arange(4.0)[:, None].expand(4, 3).contiguous()
    experts = torch.tensor([[2, 0], [0, 7], [-1, 2], [2, 0]]).int()
    moved, offsets, index = smkern.moe_permute(x, experts, 3)
    assert offsets.tolist() == [0, 3, 3, 6]
    assert index.tolist() == [3, 0, 1, -1, -1, 4, 5, 2]
    assert moved[:6, 0].tolist() == [0, 1, 3, 0, 2, 3]
    weights = torch.ones(4, 2)
    back = smkern.moe_unpermute(moved, index, weights, residual=x)
    assert back[:, 0].tolist() == [0, 2, 4, 9]
    assert smkern.moe_unpermute(moved, index, weights, residual=x, out=x) is x
    none = smkern.moe_permute(x[:0], experts[:0], 3)
    assert none[1].tolist() == [0, 0, 0, 0]


def test_offsets_are_cut_to_the_rows() -> None:
    a, w = rows(6, 8, FP32), torch.randn(3, 4, 8)
    for offsets in ((0, 2, 2, 6), (-5, 3, 99, 4), (9, 9, 9, 9), (6, 4, 2, 0)):
        found = smkern.grouped_gemm(a, w, ints(*offsets))
        bounds = [min(max(at, 0), 6) for at in offsets]
        for expert in range(3):
            part = slice(bounds[expert], bounds[expert + 1])
            torch.testing.assert_close(found[part], a[part] @ w[expert].T)


ONE = torch.ones(1)
SCALED = {"bf16": {}, "e4m3": {"a_scale": ONE, "w_scale": ONE}}
each_dtype = pytest.mark.parametrize("scales", SCALED.values(), ids=SCALED)


def given_experts(scales: dict[str, Tensor], count: int = 6) -> dict[str, Any]:
    """Rows and three experts' weights."""
    dtype = torch.float8_e4m3fn if scales else BF16
    return {"a": rows(count, 8).to(dtype), "w": torch.randn(3, 4, 8).to(dtype), **scales}


@each_dtype
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((2, 2, 3, 6), r"expert_offsets\[0\] is 2, wanted 0: pass the offsets"),
        ((-1, 2, 3, 6), r"expert_offsets\[0\] is -1, wanted 0"),
        ((0, 4, 1, 6), r"\[2\] is 1, wanted 4 \(expert_offsets\[1\]\) to 6 \(rows of a\): pass"),
        ((0, 0, -3, 6), r"expert_offsets\[2\] is -3, wanted 0"),
        ((0, 2, 3, 7), r"expert_offsets\[3\] is 7, wanted 3 .* to 6"),
        ((0, 2**31 - 1, 3, 6), r"expert_offsets\[1\] is 2147483647, wanted 0 .* to 6"),
    ],
)
def test_check_names_the_offset(
    scales: dict[str, Tensor], offsets: tuple[int, ...], message: str
) -> None:
    given = given_experts(scales) | {"expert_offsets": ints(*offsets)}
    out = torch.full((6, 4), torch.nan).to(BF16)
    with pytest.raises(ArgumentError, match=message):
        smkern.grouped_gemm(**given, out=out, check=True)
    assert bool(out.isnan().all()), "something was written"
    smkern.grouped_gemm(**given)


@each_dtype
def test_check_of_what_is_right(scales: dict[str, Tensor]) -> None:
    given = given_experts(scales)
    for offsets in ((0, 2, 2, 6), (0, 0, 0, 6), (0, 6, 6, 6), (0, 1, 2, 3), (0, 0, 0, 0)):
        x = given | {"expert_offsets": ints(*offsets)}
        found, end = smkern.grouped_gemm(**x, check=True), offsets[-1]
        assert torch.equal(found[:end], smkern.grouped_gemm(**x)[:end])


@each_dtype
def test_check_without_rows(scales: dict[str, Tensor]) -> None:
    given = given_experts(scales, 0)
    found = smkern.grouped_gemm(**given, expert_offsets=ints(0, 0, 0, 0), check=True)
    assert found.shape == (0, 4)
    with pytest.raises(ArgumentError, match=r"expert_offsets\[3\] is 1, wanted 0 .* to 0"):
        smkern.grouped_gemm(**given, expert_offsets=ints(0, 0, 0, 1), check=True)


def test_check_reads_scales_too() -> None:
    given = given_experts({"a_scale": ONE, "w_scale": -ONE})
    with pytest.raises(ArgumentError, match=r"w_scale\[0\] is -1.0: scales are finite"):
        smkern.grouped_gemm(**given, expert_offsets=ints(0, 2, 3, 6), check=True)


W = torch.randn(4, 32, 64).to(BF16)
OFFSETS = ints(0, 1, 2, 3, 5)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "logits": (lambda: smkern.topk_softmax([1.0], 1), "logits is list"),  # type: ignore[arg-type]
    "logits dims": (lambda: smkern.topk_softmax(rows()[0], 1), r"\[tokens, experts\]"),
    "logits dtype": (lambda: smkern.topk_softmax(rows().double(), 1), r"logits is torch\.float64"),
    "experts": (lambda: smkern.topk_softmax(rows(2, 513), 1), "num_experts=513.*at most 512"),
    "top_k": (lambda: smkern.topk_softmax(rows(2, 5), 6), "top_k=6.*at most 5"),
    "top_k 0": (lambda: smkern.topk_softmax(rows(), 0), "top_k=0"),
    "top_k text": (lambda: smkern.topk_softmax(rows(), "2"), "no whole number"),  # type: ignore[arg-type]
    "top_k 33": (lambda: smkern.topk_softmax(rows(), 33), "at most 32"),
    "permute dtype": (
        lambda: smkern.moe_permute(rows(), torch.zeros(5, 2).long(), 4), r"experts is torch\.int64",
    ),
    "permute device": (
        lambda: smkern.moe_permute(rows(), torch.zeros(5, 2, device="meta").int(), 4),
        "experts is on meta, x on cpu",
    ),
    "permute tokens": (
        lambda: smkern.moe_permute(rows(), ints(1, 2)[:, None], 4), "one row a token",
    ),
    "permute gaps": (
        lambda: smkern.moe_permute(rows(), torch.zeros(5, 3).int()[:, :2], 4), "without gaps",
    ),
    "permute experts": (
        lambda: smkern.moe_permute(rows(), torch.zeros(5, 2).int(), 0), "num_experts=0",
    ),
    "topk out": (
        lambda: smkern.topk_softmax(rows(), 2, out=rows()),  # type: ignore[arg-type]
        r"out is Tensor: pass \(weights, experts\)",
    ),
    "permute out": (
        lambda: smkern.moe_permute(
            rows(), torch.zeros(5, 2).int(), 4, out=(rows(9), OFFSETS, ints(*range(10)))
        ),
        r"rows is \[9, 64\]",
    ),
    "w dims": (lambda: smkern.grouped_gemm(rows(), W[0], OFFSETS), r"\[experts, n, k\]"),
    "w width": (lambda: smkern.grouped_gemm(rows(5, 48), W, OFFSETS), r"wanted \[experts, n, 48\]"),
    "w dtype": (lambda: smkern.grouped_gemm(rows(), W.half(), OFFSETS), r"w is torch\.float16"),
    "w inner": (
        lambda: smkern.grouped_gemm(rows(), torch.randn(4, 64, 32).to(BF16).mT, OFFSETS),
        "inner stride",
    ),
    "w odd": (lambda: smkern.grouped_gemm(rows(), W[:, :31], OFFSETS, swiglu=True), "31 rows"),
    "offsets": (lambda: smkern.grouped_gemm(rows(), W, OFFSETS[:4]), r"wanted \[5\]"),
    "offsets device": (
        lambda: smkern.grouped_gemm(rows(), W, OFFSETS.to("meta")), "expert_offsets is on meta",
    ),
    "offsets dtype": (lambda: smkern.grouped_gemm(rows(), W, OFFSETS.long()), "expert_offsets is"),
    "check": (
        lambda: smkern.grouped_gemm(rows(), W, OFFSETS, check=2),  # type: ignore[arg-type]
        "check=2",
    ),
    "gemm out": (
        lambda: smkern.grouped_gemm(rows(), W, OFFSETS, swiglu=True, out=rows(5, 32)),
        r"the result is \[5, 16\]",
    ),
    "index": (
        lambda: smkern.moe_unpermute(rows(), ints(0, 1, 2), torch.ones(2, 2)), r"wanted \[4\]",
    ),
    "weights": (
        lambda: smkern.moe_unpermute(rows(), ints(0, 1), torch.ones(1, 2).to(BF16)),
        r"weights is torch\.bfloat16",
    ),
    "residual": (
        lambda: smkern.moe_unpermute(
            rows(), ints(0, 1), torch.ones(1, 2), residual=rows(2)
        ),
        r"residual has shape \[2, 64\], wanted \[1, 64\]",
    ),
    "residual dtype": (
        lambda: smkern.moe_unpermute(
            rows(), ints(0, 1), torch.ones(1, 2), residual=rows(1, dtype=FP16)
        ),
        r"residual is torch\.float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        call()


def test_overlaps_and_budgets() -> None:
    y = rows(4)
    with pytest.raises(ArgumentError, match=r"rows at .* overlaps x"):
        smkern.moe_permute(y[:2], ints(0, 1)[:, None], 4, out=(y[1:3], OFFSETS.clone(), ints(0, 0)))
    with pytest.raises(ArgumentError, match=r"out at .* overlaps a"):
        smkern.grouped_gemm(y, torch.zeros(4, 64, 64).to(BF16), OFFSETS, out=y)
    with pytest.raises(ArgumentError, match=r"out at .* overlaps y"):
        smkern.moe_unpermute(y, ints(0, 1, 2, 3), torch.ones(2, 2), out=y[:2])
    with pytest.raises(ArgumentError, match=r"residual may only be out itself"):
        smkern.moe_unpermute(
            rows(4), ints(0, 1, 2, 3), torch.ones(2, 2), residual=y[:2], out=y[1:3]
        )
    with pytest.raises(BudgetError, match="num_sms=0"):
        smkern.topk_softmax(rows(), 2, num_sms=0)


@pytest.mark.slow
def test_opcheck() -> None:
    x, experts = rows(4, 16, FP32), torch.zeros(4, 2).int()
    operators = torch.ops.smkern
    torch.library.opcheck(operators.topk_softmax.default, (x, 2), {"renormalize": False})
    torch.library.opcheck(operators.moe_permute.default, (x, experts, 3))
    moved, offsets, index = smkern.moe_permute(x, experts, 3)
    torch.library.opcheck(operators.moe_permute_out.default, (x, experts, 3, moved, offsets, index))
    w = torch.randn(3, 8, 16)
    options = {"swiglu": True, "check": True}
    torch.library.opcheck(operators.grouped_gemm.default, (moved, w, offsets), options)
    torch.library.opcheck(operators.grouped_gemm_out.default, (moved, w, offsets, rows(8, 8, FP32)))
    args = (moved, index, torch.ones(4, 2))
    torch.library.opcheck(operators.moe_unpermute.default, args, {"residual": x})
    torch.library.opcheck(operators.moe_unpermute_out.default, (*args, x.clone()))


@pytest.mark.slow
def test_compiled() -> None:
    x, router = rows(6, 16, FP32), torch.randn(5, 16)
    gate_up, down = torch.randn(5, 8, 16), torch.randn(5, 16, 4)

    def step(x: Tensor) -> Tensor:
        return layer(x, router, gate_up, down, 2, renormalize=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), step(x))


@pytest.mark.slow
def test_compiled_check() -> None:
    a, w = rows(6, 8, FP32), torch.randn(3, 4, 8)

    def step(offsets: Tensor) -> Tensor:
        return smkern.grouped_gemm(a, w, offsets, check=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ints(0, 2, 2, 6)), step(ints(0, 2, 2, 6)))
    with pytest.raises(ArgumentError, match=r"expert_offsets\[2\] is 1"):
        compiled(ints(0, 2, 1, 6))
