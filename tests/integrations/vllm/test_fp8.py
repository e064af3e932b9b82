"""vLLM's linear layers of fp8 checkpoints, on CPU tensors and stubs of vLLM's classes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import smkern
from smkern.errors import ConfigError
from smkern.integrations import vllm as ours
from smkern.models import Weights
from smkern.models.activations import QuantizedRows
from smkern.models.products import quantized
from tests.integrations.vllm import stubs
from tests.integrations.vllm.linear_stubs import (
    QUANTIZED,
    SECOND_LOADER,
    Attention,
    LinearBase,
    ParallelLMHead,
    RoutedExperts,
    Stock,
)
from tests.models.fp8_checkpoints import BLOCKS, CONFIGS, FP8, SIZES, compressed, write
from tests.ops.tensors import default_dtype

pytestmark = pytest.mark.slow

FUSED: dict[str, tuple[str, tuple[str, ...], list[int], int]] = {
    "qkv": ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), [256, 128, 128], 256),
    "o": ("self_attn.o_proj", ("o_proj",), [256], 256),
    "gate_up": ("mlp.gate_up_proj", ("gate_proj", "up_proj"), [384, 384], 256),
    "down": ("mlp.down_proj", ("down_proj",), [256], 384),
}
"""A layer's weights by smkern's names: vLLM's, the checkpoint's, their rows, and columns."""
KINDS = pytest.mark.parametrize("kind", CONFIGS)


@pytest.fixture(autouse=True)
def _stubbed() -> Iterator[None]:
    with stubs.stubbed():
        ours.register()
        yield


def config_of(said: dict[str, Any]) -> Any:
    return QUANTIZED["smkern"].from_config({**said, "total_num_heads": 4})  # as vLLM adds


def loaded(tensors: dict[str, Tensor], config: Any, which: str) -> LinearBase:
    """A layer as vLLM makes and fills it, a projection of the checkpoint at a time."""
    fused, names, parts, columns = FUSED[which]
    layer = LinearBase(None, columns, parts, config=config, prefix=f"model.layers.0.{fused}")
    for shard, name in enumerate(names):
        base = f"model.layers.0.{fused.partition('.')[0]}.{name}"
        for parameter_name, parameter in layer.named_parameters():
            parameter.weight_loader(parameter, tensors[f"{base}.{parameter_name}"], shard)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def by_hand(tensors: dict[str, Tensor], which: str, x: Tensor, is_block: bool) -> Tensor:
    """The product in fp64 of what weights and rounded inputs stand for."""
    fused, names, _, columns = FUSED[which]
    products, bases = [], [f"model.layers.0.{fused.partition('.')[0]}.{name}" for name in names]
    static = [tensors[f"{base}.input_scale"] for base in bases if f"{base}.input_scale" in tensors]
    groups = x.unflatten(-1, (-1, 128 if is_block else columns))
    scale = max(static) if static else groups.abs().amax(-1, keepdim=True) / 448
    rounded = (groups * (1 / scale)).clamp(-448, 448).to(FP8).double() * scale.double()
    for base in bases:
        (of,) = (t for n, t in tensors.items() if n.startswith(f"{base}.weight_scale"))
        weight = tensors[f"{base}.weight"].double()
        each = [-(-size // n) for size, n in zip(weight.shape, of.shape or (1, 1), strict=True)]
        wide = of.double().reshape(of.shape or (1, 1))
        for dim, count in enumerate(each):
            wide = wide.repeat_interleave(count, dim)
        products.append(rounded.flatten(-2) @ (weight * wide).T)
    return torch.cat(products, -1)


@KINDS
@pytest.mark.parametrize("which", FUSED)
def test_a_layer_is_its_product(tmp_path: Path, kind: str, which: str) -> None:
    """Against fp64 by hand, and to the bit what smkern's decoder computes of the same files."""
    tensors, (said, means) = write(tmp_path, kind), CONFIGS[kind]
    layer = loaded(tensors, config_of(said), which)
    x = torch.randn(2, 5, layer.weight.shape[1])
    found = layer.quant_method.apply(layer, x)
    expected = by_hand(tensors, which, x, means.kind == "fp8-block")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

    decoder = Weights.load(tmp_path).layers[0]
    scales, rows = getattr(decoder.scales, which), x.flatten(0, 1)
    of_rows = (10, rows.shape[1] // 128) if means.kind == "fp8-block" else (10,)
    into = QuantizedRows(torch.empty_like(rows, dtype=FP8), torch.empty(of_rows))
    values, x_scale, w_scale = quantized(rows, scales, into, None)
    same = smkern.gemm(
        values, getattr(decoder, which), a_scale=x_scale, w_scale=w_scale, out_dtype=torch.float32
    )
    assert torch.equal(found.flatten(0, 1), same)


@KINDS
def test_weights_stay_as_they_were_loaded(tmp_path: Path, kind: str) -> None:
    """Projections with scales of their own are not quantised anew to share one."""
    tensors = write(tmp_path, kind)
    layer = loaded(tensors, config_of(CONFIGS[kind][0]), "qkv")
    base = "model.layers.0.self_attn"
    parts = torch.cat([tensors[f"{base}.{x}_proj.weight"].view(torch.uint8) for x in "qkv"])
    assert torch.equal(layer.weight.view(torch.uint8), parts)


@pytest.mark.parametrize("kind", [x for x, y in CONFIGS.items() if y[1].kind == "fp8-tensor"])
def test_one_number_a_matrix_stays_one_where_inputs_have_one(tmp_path: Path, kind: str) -> None:
    """cuBLASLt takes one number on both sides, or a number a row on both."""
    (said, means), tensors = CONFIGS[kind], write(tmp_path, kind)
    for which, rows in (("o", 256), ("qkv", 512)):
        (scale,) = (p for n, p in loaded(tensors, config_of(said), which).named_parameters()
                    if n.startswith("weight_scale"))  # fmt: skip
        stays = means.activations == "static" and which == "o"
        assert scale.numel() == (1 if stays else rows)


def test_a_bias_is_added_in_the_inputs_dtype(tmp_path: Path) -> None:
    layer = loaded(write(tmp_path, "channels"), config_of(CONFIGS["channels"][0]), "o")
    x, bias = torch.randn(3, 256).bfloat16(), torch.randn(256).bfloat16()
    found = layer.quant_method.apply(layer, x, bias)
    assert found.dtype is torch.bfloat16
    plain = layer.quant_method.apply(layer, x).float()
    torch.testing.assert_close(found.float(), plain + bias.float(), rtol=1e-2, atol=1e-2)


@KINDS
def test_torch_compile_traces_a_layer_once_for_any_rows(tmp_path: Path, kind: str) -> None:
    layer = loaded(write(tmp_path, kind), config_of(CONFIGS[kind][0]), "qkv")
    counted = CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        lambda x: layer.quant_method.apply(layer, x) * 2, fullgraph=True, backend=counted
    )
    for rows in (3, 70):
        x = torch.randn(rows, 256)
        torch._dynamo.mark_dynamic(x, 0)  # as vLLM does: it raises where a size is fixed
        assert torch.equal(step(x), layer.quant_method.apply(layer, x) * 2)
    assert counted.frame_count == 1


def test_a_scale_that_no_one_loads_shows(tmp_path: Path) -> None:
    layer = LinearBase(None, 256, [128, 128], config=config_of(CONFIGS["tensors"][0]))
    layer.weight.data.view(torch.uint8).fill_(1)
    layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor(0.5), 0)
    layer.quant_method.process_weights_after_loading(layer)
    found = layer.quant_method.apply(layer, torch.ones(1, 256))
    assert found[:, :128].isfinite().all()
    assert found[:, 128:].isnan().all()


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (BLOCKS | {"modules_to_not_convert": ["lm_head", "left"]}, "left"),
        (compressed("channel", "token", ignore=["lm_head", "re:.*mlp.gate$"]), "a.mlp.gate"),
    ],
    ids=["fp8", "compressed-tensors"],
)
def test_layers_that_a_checkpoint_leaves_unquantised_are_served_so(said, left) -> None:
    config = config_of(said)
    layer = LinearBase(None, 64, 32, config=config, prefix=left)
    layer.weight.data.normal_()
    x = torch.randn(3, 64)
    found = layer.quant_method.apply(layer, x)
    assert type(layer.quant_method).__name__ == "SmkernLinearMethod"
    torch.testing.assert_close(found, x @ layer.weight.T, rtol=1e-4, atol=1e-4)
    other = LinearBase(None, 128, 128, config=config, prefix="other")
    assert other.weight.dtype is FP8


@pytest.mark.parametrize("said", [BLOCKS, compressed("channel", "token")], ids=["fp8", "ct"])
def test_experts_caches_and_heads_stay_vllms(said: dict[str, Any]) -> None:
    config = config_of(said)
    assert config.get_quant_method(RoutedExperts(), "experts") == Stock("experts", config)
    assert config.get_quant_method(Attention(), "attn") == Stock("cache", config)
    assert config.get_quant_method(ParallelLMHead(), "lm_head") is None


def test_a_config_is_vllms_own_of_the_checkpoint_and_travels_to_other_ranks() -> None:
    """Models ask it for its blocks, caches for their scheme; it is pickled on the way."""
    kv = CONFIGS["static channels"][0]
    made = [pickle.loads(pickle.dumps(config_of(x))) for x in (BLOCKS, kv)]
    assert made[0].weight_block_size == [128, 128]
    assert made[1].kv_cache_scheme == kv["kv_cache_scheme"]
    for config in made:
        assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
        assert config.get_min_capability() == 89
        assert LinearBase(None, 128, [128], config=config).weight.dtype is FP8


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "awq"}, r"quant_method='awq'"),
        (BLOCKS | {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (compressed("group", "token"), "strategy='group'"),
        (compressed("channel", "token", transform_config={"x": 1}), "transform_config"),
    ],
)
def test_another_quantisation_is_refused_by_name_with_the_way_out(said, named) -> None:
    with pytest.raises(ConfigError, match=f"{named}.* leave quantization=smkern out"):
        config_of(said)


def test_another_vllm_is_refused_where_an_fp8_checkpoint_is_served() -> None:
    with stubs.stubbed("0.34.0"):
        ours.register()
        with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0: .* 0\.26"):
            config_of(BLOCKS)


@pytest.mark.parametrize(
    ("columns", "parts", "tp", "named"),
    [
        (256, [192, 128], 1, r"projections of \[192\] rows and 256 columns"),
        (256, [192], 2, r"projections of \[192\] rows and 256 columns"),
        (192, [128], 1, r"projections of \[\] rows and 192 columns"),
        (256, [128, 64], 2, r"projections of \[128, 64\] rows and 256 columns"),
    ],
)
def test_projections_and_shards_that_end_within_a_block_are_refused(
    columns, parts, tp, named
) -> None:
    make = partial(LinearBase, None, columns, parts, prefix="layers.7.proj", tp=tp)
    with pytest.raises(ConfigError, match=f"layers.7.proj: {named}.*tensor_parallel_size"):
        make(config=config_of(BLOCKS))
    assert make(config=config_of(compressed("channel", "token"))).weight.shape[1] == columns


def test_the_last_projection_of_a_whole_layer_may_end_within_a_block() -> None:
    layer = LinearBase(None, 256, [256, 64], config=config_of(BLOCKS))
    shapes = [tuple(x.shape) for x in layer.parameters()]
    assert shapes == [(320, 256), (3, 2)]


def test_parameters_load_themselves() -> None:
    """vLLM's other loader cannot fill scales of several projections."""
    config_of(BLOCKS)
    assert "SmkernFp8LinearMethod" in SECOND_LOADER


@pytest.mark.parametrize("asked", [False, True])
def test_rows_alone_where_vllm_is_asked_for_batch_invariance(tmp_path, monkeypatch, asked) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", asked)
    found, gemm = [], smkern.gemm

    def spy(*given: Any, batch_invariant: bool = False, **named: Any) -> Tensor:
        found.append(batch_invariant)
        return gemm(*given, **named)

    monkeypatch.setattr(smkern, "gemm", spy)
    layer = loaded(write(tmp_path, "channels"), config_of(CONFIGS["channels"][0]), "o")
    layer.quant_method.apply(layer, torch.randn(3, 256))
    assert found == [asked]


@KINDS
@pytest.mark.parametrize("same", [False, True])
def test_layers_of_one_shape_are_warmed_up_once(kind: str, same: bool, monkeypatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", same)
    asked: list[smkern.Fp8Calls] = []
    monkeypatch.setattr(smkern, "warmup", lambda **given: asked.extend(given["calls"]))
    monkeypatch.setattr(smkern, "current_num_sms", lambda: 132)
    said, means = CONFIGS[kind]
    config = config_of(said)
    for rows, has_bias in ((256, False), (128, False), (256, False), (256, True)):
        layer = LinearBase(None, SIZES["hidden_size"], rows, config=config)
        layer.orig_dtype = torch.bfloat16
        layer.bias = torch.nn.Parameter(torch.zeros(rows)) if has_bias else None
        on_gpu = SimpleNamespace(is_cuda=True, shape=layer.weight.shape)
        del layer.weight
        layer.weight = on_gpu
        with default_dtype(torch.bfloat16):
            layer.quant_method.process_weights_after_loading(layer)
    assert [x.shapes for x in asked] == [((256, 256),), ((128, 256),), ((256, 256),)]
    assert [x.epilogues for x in asked] == [("none",), ("none",), ("bias",)]
    assert {(x.blocks, x.max_m) for x in asked} == {(means.kind == "fp8-block", 64)}
    assert {x.batch_invariant for x in asked} == {(same,)}
    is_static = means.activations == "static"
    widths = ((), (256,)) if is_static else ((256,), ())
    assert {(x.quantized, x.static) for x in asked} == {widths}
