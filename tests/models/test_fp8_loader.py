"""fp8 checkpoints of each kind: what is loaded, and what is refused before anything is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from smkern.errors import ConfigError, DeviceError, WeightsError
from smkern.models import Quantization, Weights, preset, quantize
from smkern.models.layer_quantizing import check_device
from tests.gpus import A100, L40S, install
from tests.models.fp8_checkpoints import CONFIGS, FP8, config_of, is_linear, quantized, write
from tests.models.peers import assert_same, rewrite

pytestmark = pytest.mark.slow

Q = "model.layers.1.self_attn.q_proj"


def _read(weights: Weights, name: str) -> Tensor:
    """A loaded tensor, whatever the checkpoint calls it."""
    named = weights.named()
    return named[name] if name in named else named[name.replace("_scale", "_scale_inv")]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_what_is_written_is_loaded(tmp_path: Path, kind: str, family: str):
    tensors = write(tmp_path, kind, family)
    weights = Weights.load(tmp_path)
    assert weights.config.quantization == CONFIGS[kind][1]
    for name, want in tensors.items():
        if name.endswith("input_scale"):
            continue
        got = _read(weights, name)
        assert got.dtype is want.dtype, name
        if name.endswith("weight_scale") and want.dim() == 0:
            want = want.expand(got.shape)  # a scale a row serves projections that are stacked
        assert torch.equal(got.float(), want.reshape(got.shape).float()), name
    assert len(weights.named()) == len(tensors)


def test_inputs_that_projections_share_get_the_largest_scale(tmp_path: Path):
    tensors = write(tmp_path, "static")
    layer = Weights.load(tmp_path).layers[1]
    assert layer.scales.qkv is not None
    assert layer.scales.o is not None
    of = [tensors[f"model.layers.1.self_attn.{x}_proj.input_scale"] for x in "qkvo"]
    assert layer.scales.qkv.input == max(of[:3])
    assert layer.scales.o.input == of[3]
    assert len({float(x) for x in of}) == 4


def test_scales_of_a_cache(tmp_path: Path):
    write(tmp_path, "autofp8")
    scales = Weights.load(tmp_path).kv_scales
    assert scales is not None
    assert scales.tolist() == [[0.5, 0.25], [1.5, 1.25]]
    assert Weights.load(_other(tmp_path, "blocks")).kv_scales is None


def _other(folder: Path, kind: str) -> Path:
    (folder / kind).mkdir()
    write(folder / kind, kind)
    return folder / kind


def test_scales_of_a_cache_without_a_promise():
    """Also of a checkpoint that is not quantized, and by the name that older makers gave them."""
    config = config_of()
    named = Weights.random(config).named()
    for layer in range(2):
        base = f"model.layers.{layer}.self_attn"
        named[f"{base}.k_proj.output_scale"] = torch.tensor(2.0)
        named[f"{base}.v_scale"] = torch.tensor([3.0])
    scales = Weights.from_tensors(config, named).kv_scales
    assert scales is not None
    assert scales.tolist() == [[2, 3], [2, 3]]
    del named["model.layers.1.self_attn.v_scale"]
    with pytest.raises(WeightsError, match=r"lacks 1 tensor: model\.layers\.1\.self_attn\.v_scale"):
        Weights.from_tensors(config, named)


def test_scales_may_be_bf16_and_keep_fp32(tmp_path: Path):
    """Qwen3's are bf16, DeepSeek's fp32; products read fp32."""
    tensors = write(tmp_path, "blocks")
    name = f"{Q}.weight_scale_inv"
    rewrite(tmp_path, lambda t: t.update({name: t[name].bfloat16()}))
    got = Weights.load(tmp_path).named()[name]
    assert got.dtype is torch.float32
    assert torch.equal(got, tensors[name].bfloat16().float())


def test_other_tensors_are_converted_and_values_are_not(tmp_path: Path):
    tensors = write(tmp_path, "blocks")
    weights = Weights.load(tmp_path, dtype=torch.bfloat16)
    named = weights.named()
    assert named["model.norm.weight"].dtype is torch.bfloat16
    assert torch.equal(named[f"{Q}.weight"].float(), tensors[f"{Q}.weight"].float())
    with pytest.raises(WeightsError, match=r"is torch\.float32, the conf.* says"):
        Weights.load(tmp_path, config=weights.config)


def test_tensors_in_memory_are_the_same(tmp_path: Path):
    write(tmp_path, "static channels")
    loaded = Weights.load(tmp_path)
    again = Weights.from_tensors(loaded.config, loaded.named())
    assert_same(again, loaded)
    assert again.kv_scales is not None


SCALE = f"{Q}.weight_scale_inv"
SPOILED = {
    "scales missing": (lambda t: t.pop(SCALE), rf"lacks 1 tensor: {SCALE}"),
    "weight missing": (lambda t: t.pop(f"{Q}.weight"), rf"lacks 1 tensor: {Q}\.weight"),
    "another block": (
        lambda t: t.update({SCALE: torch.ones(4, 4)}),
        rf"{SCALE} .* has shape \[4, 4\], fp8-block scales of this tensor have \[2, 2\]",
    ),
    "one for all": (lambda t: t.update({SCALE: torch.ones(1)}), r"has shape \[1\], fp8-block"),
    "both names": (
        lambda t: t.update({f"{Q}.weight_scale": torch.ones(2, 2)}),
        rf"has 1 tensor: {Q}\.weight_scale that a",
    ),
    "not finite": (lambda t: t[SCALE].fill_(float("inf")), "not finite or not above 0"),
    "zero": (lambda t: t[SCALE][1, 1].zero_(), "not finite or not above 0"),
    "negative": (lambda t: t[SCALE].neg_(), "not finite or not above 0"),
    "integers": (lambda t: t.update({SCALE: t[SCALE].to(torch.uint8)}), r"is torch\.uint8, scales"),
    "e5m2": (
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.float8_e5m2)}),
        rf"{Q}\.weight .* is torch\.float8_e5m2, quantization_config promises .*e4m3fn",
    ),
    "bf16": (
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].bfloat16()}),
        rf"{Q}\.weight .* is torch\.bfloat16, quantization_config promises",
    ),
    "a head in fp8": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(FP8)}),
        r"lm_head\.weight .* is torch\.float8_e4m3fn, there is",
    ),
    "zero point": (
        lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(1)}),
        rf"has 1 tensor: {Q}\.weight_zero_point that a",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_does_not_belong_is_named(tmp_path: Path, what: str):
    write(tmp_path, "blocks")
    change, message = SPOILED[what]
    rewrite(tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        Weights.load(tmp_path)


def test_a_promised_scale_of_a_cache_is_missing(tmp_path: Path):
    write(tmp_path, "autofp8")
    rewrite(tmp_path, lambda t: [t.pop(x) for x in list(t) if x.endswith(("k_scale", "v_scale"))])
    with pytest.raises(WeightsError, match=r"lacks 4 tensors: .*0\.self_attn\.k_scale"):
        Weights.load(tmp_path)


def test_a_scale_a_head_is_refused(tmp_path: Path):
    write(tmp_path, "autofp8")
    name = "model.layers.0.self_attn.k_scale"
    rewrite(tmp_path, lambda t: t.update({name: torch.ones(2)}))
    with pytest.raises(WeightsError, match=rf"{name} .* has shape \[2\]"):
        Weights.load(tmp_path)


def test_fp8_without_a_quantization_config(tmp_path: Path):
    write(tmp_path, "blocks")
    document = json.loads((tmp_path / "config.json").read_text())
    del document["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(WeightsError, match=r"has \d+ tensors: .*weight_scale_inv.* that a"):
        Weights.load(tmp_path)


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-channel", "fp8-tensor"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_are_quantized(kind: str, family: str):
    """Projection by projection as checkpoints are, and random ones from the same seed."""
    config = config_of(family)
    plain = Weights.random(config, 4)
    made = quantize(plain, kind)
    assert made.config == config.replace(quantization=Quantization(kind))
    assert made.embed is plain.embed
    named = made.named()
    for name, weight in plain.named().items():
        if not is_linear(name):
            assert torch.equal(named[name], weight)
            continue
        values, scales = quantized(weight, kind.removeprefix("fp8-"))
        got = _read(made, name.replace(".weight", ".weight_scale"))
        assert torch.equal(named[name].float(), values.float()), name
        assert torch.equal(got, scales.expand(got.shape)), name
    assert_same(Weights.random(config, 4, dtype=kind), made)


def test_what_cannot_be_quantized_is_named():
    weights = Weights.random(config_of())
    with pytest.raises(ConfigError, match="the weights are quantized"):
        quantize(quantize(weights, "fp8-channel"), "fp8-block")
    with pytest.raises(ConfigError, match="kind='int8'"):
        quantize(weights, "int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights are a dict"):
        quantize({}, "fp8-block")  # type: ignore[arg-type]
    weights.layers[1].o[3, 5] = float("nan")
    with pytest.raises(WeightsError, match="o of layer 1 holds values that are not finite"):
        quantize(weights, "fp8-block")


def test_gpus_without_e4m3_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch):
    config = preset("qwen3-8b-fp8")
    install(monkeypatch, A100)
    for make in (Weights.empty, partial(Weights.random, seed=1)):
        with pytest.raises(DeviceError, match=r"compute capability 8\.0 has no e4m3"):
            make(config, device="cuda:0")
    install(monkeypatch, L40S)
    check_device(config, torch.device("cuda:0"))
    check_device(config, torch.device("cpu"))


def test_zeros_are_quantized():
    weights = Weights.random(config_of())
    weights.layers[0].qkv[:128].zero_()
    layer = quantize(weights, "fp8-block").layers[0]
    assert layer.scales.qkv is not None
    assert (layer.scales.qkv.weight[0] == 1).all()
    assert (layer.qkv[:128].float() == 0).all()


def test_bytes_of_8b():
    """Layers take half of bf16 and one scale for 128 x 128; embedding and head stay."""
    config = preset("qwen3-8b")
    plain, small = (
        Weights.empty(config.replace(quantization=given), "meta")
        for given in (None, Quantization("fp8-block"))
    )
    layers = [sum(x.nbytes for y in w.layers for x in y.tensors()) for w in (plain, small)]
    assert plain.num_bytes == config.weight_bytes == 2 * config.num_parameters
    assert small.num_bytes == pytest.approx(small.config.weight_bytes, rel=1e-3)
    assert layers[1] / layers[0] <= 0.51
    assert small.num_bytes / plain.num_bytes <= 0.60
