"""A model's calls of all families; what they need on a device is each family's own matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smkern.errors import ArgumentError, ConfigError
from smkern.models import ModelCalls, Quantization, preset
from smkern.models.quantization import KINDS
from smkern.ops import AppendCalls, AttentionCalls, Fp8Calls, RowsCalls
from smkern.ops.gemm.warmup import GemmCalls
from smkern.ops.moe.warmup import MoeCalls
from smkern.ops.swiglu import SwigluCalls


def _shapes(name: str) -> dict[str, list[tuple[int, int]]]:
    calls = ModelCalls(preset(name), max_batch=64).calls()
    found: dict[str, list[tuple[int, int]]] = {}
    for call in calls:
        if isinstance(call, GemmCalls):
            found.setdefault(f"{call.epilogues[0].key}, M to {call.max_m}", []).extend(call.shapes)
    return found


def test_a_dense_models_products():
    assert _shapes("qwen3-8b") == {
        "none, M to 8192": [(6144, 4096)],
        "residual, M to 8192": [(4096, 4096), (4096, 12_288)],
        "none, M to 64": [(151_936, 4096)],
    }
    swiglu = [x for x in ModelCalls(preset("qwen3-8b")).calls() if isinstance(x, SwigluCalls)]
    assert [x.shapes for x in swiglu] == [[(12_288, 4096)]]


def test_a_mixtures_products():
    assert _shapes("qwen3-30b-a3b") == {
        "none, M to 8192": [(128, 2048), (5120, 2048)],
        "residual, M to 8192": [(2048, 4096)],
        "none, M to 64": [(151_936, 2048)],
    }
    moe = [x for x in ModelCalls(preset("qwen3-30b-a3b")).calls() if isinstance(x, MoeCalls)]
    assert [(x.hidden, x.intermediate, x.num_experts, x.top_k) for x in moe] == [
        (2048, 768, 128, 8)
    ]


def test_a_bias_is_warmed():
    assert _shapes("qwen2.5-7b") == {
        "bias, M to 8192": [(4608, 3584)],
        "residual, M to 8192": [(3584, 3584), (3584, 18_944)],
        "none, M to 64": [(152_064, 3584)],
    }
    for kind in KINDS:
        found = _fp8("qwen2.5-7b", kind=kind)
        assert (found["bias"], found.get("none")) == ([(4608, 3584)], None)


@pytest.mark.parametrize("name", ["max_tokens", "max_batch", "max_q_len"])
def test_numbers_that_cannot_be(name):
    with pytest.raises(ArgumentError, match=f"{name}=0"):
        ModelCalls(preset("qwen3-8b"), **{name: 0})


@pytest.mark.parametrize("same", [False, True])
def test_the_decoders_mode_is_warmed(same: bool):
    for call in ModelCalls(preset("qwen3-8b"), batch_invariant=same).calls():
        if isinstance(call, GemmCalls | SwigluCalls):
            assert list(call.batch_invariant) == [same]


def test_the_pools_dtype_is_warmed():
    for dtype, want in ((torch.float8_e4m3fn,) * 2, (torch.bfloat16, None), (None, None)):
        calls = list(ModelCalls(preset("qwen3-8b"), cache_dtype=dtype).calls())
        found = [x.cache_dtype for x in calls if isinstance(x, AttentionCalls | AppendCalls)]
        assert found == [want, want]


def _fp8(name: str, **given: Any) -> dict[str, list[Any]]:
    """What a quantized model's calls on e4m3 name; other products are the head's and routers'."""
    config = preset(name).replace(quantization=Quantization(**given))
    found: dict[str, list[Any]] = {}
    for call in ModelCalls(config, max_batch=64, batch_invariant=False).calls():
        assert not isinstance(call, SwigluCalls)
        if isinstance(call, GemmCalls):
            assert {n for n, _ in call.shapes} <= {config.vocab_size, 128}
        if isinstance(call, Fp8Calls):
            assert call.blocks == (given["kind"] == "fp8-block")
            for field in (
                "swiglu",
                "quantized_swiglu",
                "experts",
                "hidden",
                "gated",
                "quantized",
                "static",
            ):
                found.setdefault(field, []).extend(getattr(call, field))
            found.setdefault(call.epilogues[0], []).extend(call.shapes)
    return {field: values for field, values in found.items() if values}


def test_a_part_of_a_models_calls():
    """Of two GPUs each: parts of the sums come without the residual, which the norm adds."""
    calls = [*ModelCalls(preset("qwen3-8b"), max_batch=64, tp=2).calls()]
    products = [(x.shapes, x.epilogues[0].key) for x in calls if isinstance(x, GemmCalls)]
    assert products == [
        ([(75_968, 4096)], "none"),
        ([(3072, 4096)], "none"),
        ([(4096, 2048), (4096, 6144)], "none"),
    ]
    (rows,) = [x for x in calls if isinstance(x, RowsCalls)]
    assert (rows.hidden, rows.added, rows.embedded) == ([4096], [4096], [2048, 4096])
    (moe,) = [
        x for x in ModelCalls(preset("qwen3-30b-a3b"), tp=2).calls() if isinstance(x, MoeCalls)
    ]
    assert not moe.residual
    quantized = preset("qwen3-8b").replace(quantization=Quantization("fp8-block"))
    found = [x for x in ModelCalls(quantized, tp=2).calls() if isinstance(x, Fp8Calls)]
    assert [x.shapes for x in found if list(x.epilogues) == ["residual"]] == []
    assert [x.quantized for x in found if x.quantized] == [[4096]]
    with pytest.raises(ConfigError, match="tp=3"):
        ModelCalls(preset("qwen3-8b"), tp=3)


def test_a_quantized_models_calls():
    products = {"none": [(6144, 4096)], "residual": [(4096, 4096), (4096, 12_288)]}
    dynamic = {"quantized_swiglu": [(12_288, 4096)], "hidden": [4096]}
    assert _fp8("qwen3-8b", kind="fp8-block") == products | dynamic
    for kind in ("fp8-channel", "fp8-tensor"):
        assert _fp8("qwen3-8b", kind=kind) == products | dynamic | {"quantized": [4096]}
    assert _fp8("qwen3-8b", kind="fp8-tensor", activations="static") == products | {
        "swiglu": [(12_288, 4096)],
        "static": [4096, 12_288],
    }


def test_attention_that_writes_e4m3_is_warmed():
    config = preset("qwen3-8b")
    blocks, rows = (config.replace(quantization=Quantization(x)) for x in KINDS[:2])
    for given, scaled in ((blocks, True), (rows, False), (config, False)):
        (found,) = [x for x in ModelCalls(given).calls() if isinstance(x, AttentionCalls)]
        assert found.out_scale == scaled
        (rows,) = [x for x in ModelCalls(given).calls() if isinstance(x, RowsCalls) and x.embedded]
        assert rows.embedded == ([64, 2048, 4096] if scaled else [4096])


def test_a_quantized_mixtures_calls():
    assert _fp8("qwen3-30b-a3b", kind="fp8-block") == {
        "experts": [(128, 768, 2048, True), (128, 2048, 768, False)],
        "none": [(5120, 2048)],
        "residual": [(2048, 4096)],
        "quantized": [768, 2048],
        "hidden": [2048],
    }


def test_experts_have_no_batch_invariant_mode():
    with pytest.raises(ConfigError, match="128 experts: the grouped GEMM sums"):
        ModelCalls(preset("qwen3-30b-a3b"), batch_invariant=True)
