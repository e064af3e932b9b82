"""What a `quantization_config` says of a decoder, and what is refused by its entry."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from smkern.errors import ConfigError
from smkern.models import ModelConfig, Quantization, preset
from tests.models.fp8_checkpoints import BLOCKS, CONFIGS, TENSOR, compressed
from tests.models.peers import hf_config


def _config(family: str = "qwen3", **entries: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(family, intermediate_size=256).to_dict() | entries)


@pytest.mark.parametrize("name", CONFIGS)
def test_served_checkpoints(name: str):
    written, want = CONFIGS[name]
    assert _config(quantization_config=written).quantization == want


def test_no_quantization():
    assert _config().quantization is None
    assert _config(quantization_config=None).quantization is None


def _changed(written: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A configuration with another value at a dotted path."""
    found = deepcopy(written)
    *above, last = path.split(".")
    at = found
    for name in above:
        at = at[name]
    at[last] = value
    return found


CHANNEL, GROUP = compressed("channel", "token"), "config_groups.group_0"
REFUSED = [
    ("blocks", 3, "is a int"),
    (BLOCKS, ("quant_method", "awq"), "quant_method='awq': there is 'fp8'"),
    (BLOCKS, ("quant_method", None), "quant_method=None"),
    (BLOCKS, ("fmt", "e5m2"), "fmt='e5m2' is not served, wanted None or 'e4m3'"),
    (BLOCKS, ("scale_fmt", "ue8m0"), "scale_fmt='ue8m0'"),
    (BLOCKS, ("weight_block_size", [64, 64]), r"weight_block_size=\[64, 64\]"),
    (BLOCKS, ("weight_block_size", [128, True]), r"weight_block_size=\[128, True\]"),
    (BLOCKS, ("activation_scheme", "static"), "activations='static' with kind='fp8-block'"),
    (BLOCKS, ("activation_scheme", None), "activation_scheme=None"),
    (BLOCKS, ("modules_to_convert", ["model.embed_tokens"]), "modules_to_convert="),
    (BLOCKS, ("modules_to_not_convert", "lm_head"), "modules_to_not_convert='lm_head'"),
    (
        BLOCKS,
        ("modules_to_not_convert", ["lm_head", "model.layers.1.mlp.down_proj"]),
        r"leaves model\.layers\.1\.mlp\.down_proj unquantized",
    ),
    (TENSOR, ("ignored_layers", ["model.layers.0"]), r"leaves model\.layers\.0\.self_attn\.q_proj"),
    (CHANNEL, ("format", "pack-quantized"), "format='pack-quantized'"),
    (CHANNEL, ("ignore", []), "ignore does not name lm_head"),
    (CHANNEL, ("ignore", ["lm_head", "re:.*o_proj"]), r"leaves .*0\.self_attn\.o_proj"),
    (CHANNEL, ("ignore", ["lm_head", "re:("]), "regular expressions"),
    (CHANNEL, ("config_groups", {}), r"config_groups=\{\}"),
    (CHANNEL, ("config_groups", {"a": {}, "b": {}}), "one group for all"),
    (CHANNEL, (GROUP, None), "group_0=None is not served, wanted an object"),
    (CHANNEL, (f"{GROUP}.targets", ["re:.*mlp.*"]), r"group_0\.targets="),
    (CHANNEL, (f"{GROUP}.weights.num_bits", 4), r"weights\.num_bits=4 is not served, wanted 8"),
    (CHANNEL, (f"{GROUP}.weights.type", "int"), r"weights\.type='int'"),
    (CHANNEL, (f"{GROUP}.weights.symmetric", False), r"weights\.symmetric=False"),
    (CHANNEL, (f"{GROUP}.weights.strategy", "group"), r"weights\.strategy='group'"),
    (CHANNEL, (f"{GROUP}.input_activations", None), "input_activations=None .* 8-bit floats"),
    (CHANNEL, (f"{GROUP}.input_activations.strategy", "group"), "strategy='group'"),
    (CHANNEL, (f"{GROUP}.input_activations.num_bits", True), "num_bits=True"),
    (CHANNEL, (f"{GROUP}.output_activations", {"num_bits": 8}), "output_activations="),
    (CHANNEL, ("kv_cache_scheme", {"num_bits": 8, "type": "int"}), "kv_cache_scheme.type='int'"),
    (
        CHANNEL,
        ("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "attn_head"}),
        "kv_cache_scheme.strategy='attn_head'",
    ),
]


@pytest.mark.parametrize(("written", "change", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_anything_else_is_refused_by_its_entry(written: Any, change: Any, message: str):
    given = change if isinstance(written, str) else _changed(written, *change)
    with pytest.raises(ConfigError, match=message):
        _config(quantization_config=given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 4160}, "hidden_size=4160 with quantization 'fp8-block'"),
        ({"intermediate_size": 12_320}, "intermediate_size=12320 with"),
        ({"head_dim": 64, "num_kv_heads": 1}, "kv_size=64 with"),
    ],
)
def test_blocks_make_every_projection(changes: dict[str, int], message: str):
    config = preset("qwen3-8b").replace(**changes | {"rope": preset("qwen3-8b").rope.__class__(64)})
    with pytest.raises(ConfigError, match=message):
        config.replace(quantization=Quantization("fp8-block"))
    assert config.replace(quantization=Quantization("fp8-channel")).quantization is not None


@pytest.mark.parametrize("given", ["fp8", "fp8-block", 3])
def test_a_quantization_is_one(given: Any):
    with pytest.raises(ConfigError, match="quantization is a"):
        preset("qwen3-8b").replace(quantization=given)
    with pytest.raises(ConfigError, match=r"there is|are served in"):
        Quantization("fp8", given)
