"""Configurations from Hugging Face's, presets, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from smkern.errors import ConfigError
from smkern.models import ModelConfig, MoeConfig, Quantization, preset, presets
from smkern.rope import Llama3
from tests.models.peers import FAMILIES, hf_config

PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "mistral-nemo": 12_247_782_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}
"""As the model cards count them."""


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_presets_have_as_many_parameters_as_published(name):
    assert preset(name).num_parameters == PARAMETERS[name]
    assert preset(name.upper()) == presets()[name]


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"])
def test_presets_in_fp8(name):
    want = preset(name).replace(quantization=Quantization("fp8-block"))
    assert preset(f"{name}-FP8") == want
    assert want.weight_bytes < 0.6 * preset(name).weight_bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", "there is .*qwen3-8b"),
        ("Qwen/Qwen3-4B", "there is .*from_hf and LLM"),
        ("Qwen/Qwen3-8B", "did you mean 'qwen3-8b'.*from_hf and LLM"),
        ("meta-llama/Llama-3.1-8B-Instruct", "did you mean 'llama-3.1-8b'"),
        ("Qwen/Qwen2.5-7B-Instruct", "did you mean 'qwen2.5-7b'"),
    ],
)
def test_an_unknown_preset_names_a_near_one_or_all(name, words):
    with pytest.raises(ConfigError, match=f"preset '{name}': {words}"):
        preset(name)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_a_configuration_is_the_same_from_file_mapping_and_object(family, tmp_path: Path):
    theirs = hf_config(family, architectures=[f"{_title(family)}ForCausalLM"])
    theirs.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(tmp_path)
    assert config == ModelConfig.from_hf(str(tmp_path / "config.json"))
    assert config == ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config == ModelConfig.from_hf(theirs)
    assert config.architecture == family
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", "qwen3" in family)
    assert config.qkv_size == 8 * 64
    assert config.eos_token_ids == (2,)
    if family == "llama":
        assert config.rope.scaling == Llama3(8.0, 1.0, 4.0, 64)
    if family == "qwen3_moe":
        assert config.moe == MoeConfig(8, 3, 96, renormalize=True)


def test_published_files_of_older_versions():
    """rope_theta and rope_scaling at the top level, torch_dtype, several ends of a text."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "eos_token_id": [128001, 128008, 128009],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        }
    )
    ends = (128_001, 128_008, 128_009)
    assert config == preset("llama-3.1-8b").replace(eos_token_ids=ends)


SHARED = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
          "max_position_embeddings": 131_072, "rope_theta": 1e6,
          "torch_dtype": "bfloat16"}  # fmt: skip


def test_published_files_of_qwen2_and_mistral():
    qwen = {
        "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151_643, "hidden_size": 3584,
        "intermediate_size": 18_944, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "sliding_window": 131_072, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 152_064, **SHARED,
    }  # fmt: skip
    assert ModelConfig.from_hf(qwen) == preset("qwen2.5-7b")
    mistral = {
        "architectures": ["MistralForCausalLM"], "eos_token_id": 2, "head_dim": 128,
        "hidden_size": 5120, "intermediate_size": 14_336, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "sliding_window": None, "vocab_size": 131_072, **SHARED,
    }  # fmt: skip
    assert ModelConfig.from_hf(mistral) == preset("mistral-nemo")


def test_yarn_stretches_the_context_that_a_file_leaves_as_it_was():
    """As Qwen's model cards say; some makers write the stretched one."""
    contents = hf_config("qwen3").to_dict()
    assert contents["max_position_embeddings"] == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    stretched = ModelConfig.from_hf(contents | {"rope_parameters": yarn})
    assert stretched.max_position == 2048
    whole = contents | {"rope_parameters": yarn, "max_position_embeddings": 2048}
    assert ModelConfig.from_hf(whole) == stretched
    longer = contents | {"rope_parameters": yarn, "max_position_embeddings": 2500}
    assert ModelConfig.from_hf(longer).max_position == 2500
    for kind in ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}):
        assert ModelConfig.from_hf(contents | {"rope_parameters": kind}).max_position == 512
    window = {"sliding_window": 1024, "rope_parameters": yarn}
    with pytest.raises(ConfigError, match="sliding_window=1024 on all layers"):
        ModelConfig.from_hf(hf_config("mistral").to_dict() | window)


SLIDING = {"use_sliding_window": True, "layer_types": None, "max_window_layers": 0}
REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*there is \[.*'LlamaForCausalLM'"),
    ({"architectures": [], "model_type": "mamba"}, "'mamba'"),
    ({"attention_bias": True}, "attention_bias=True: the operators serve False"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu': the operators serve 'silu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"head_dim": 80}, r"head_dim=80: attention serves \[64, 96, 128, 256\]"),
    ({"num_key_value_heads": 3}, "4 query heads over 3 KV heads"),
    (SLIDING | {"sliding_window": 128}, "sliding_window=128"),
    (SLIDING | {"sliding_window": "x"}, "sliding_window='x': config.json must give it as a whole"),
    (SLIDING | {"max_window_layers": "x"}, "max_window_layers='x'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "on 1 layers"),
    ({"layer_types": ["chunked_attention"] * 2}, r"layer_types names \['chunked_attention'\]"),
    ({"model_type": "granite"}, "with model_type='granite': they disagree"),
    ({"is_causal": False}, "is_causal=False: the operators serve True"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ({"dtype": "float64"}, "dtype='float64'"),
    ({"hidden_size": None}, "hidden_size=None: config.json must give it"),
    ({"hidden_size": True}, "hidden_size=True"),
    ({"num_hidden_layers": 0}, "num_layers=0"),
    ({"hidden_size": 16_385}, "hidden_size=16385: norms serve at most 16384"),
    ({"vocab_size": 262_145}, "vocab_size=262145: sampling serves at most 262144"),
    ({"head_dim": None}, "head_dim is missing"),
    ({"head_dim": "64"}, "head_dim='64': config.json must give it as a whole number"),
    ({"architectures": 3}, "architectures=3: config.json must give it as a list"),
    ({"architectures": [["x"]]}, "architectures="),
    ({"layer_types": 2}, "layer_types=2"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps='x': config.json must give it as a finite number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"initializer_range": []}, r"initializer_range=\[\]"),
    ({"eos_token_id": "x"}, "eos_token_id='x': give a token id"),
    ({"eos_token_id": [[1]]}, "eos_token_id="),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: the heads of qwen3 rotate whole"),
    ({"rope_parameters": "x"}, "'x' as parameters of RoPE: give a dictionary"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': .* true or false"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "the rotary embedding"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_cannot_be_served_is_named(changes, message):
    contents = hf_config("qwen3", architectures=["Qwen3ForCausalLM"]).to_dict()
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(contents | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"num_experts_per_tok": 9}, "top_k=9 of 8 experts"),
        ({"num_experts": 513}, "513 experts a token: routing serves at most 32 of 512"),
        ({"num_experts": 64, "num_experts_per_tok": 33}, "33 of 64 experts a token"),
        ({"num_experts": None, "num_local_experts": None}, "num_local_experts=None"),
    ],
)
def test_mixtures_that_cannot_be_served(changes, message):
    contents = hf_config("qwen3_moe").to_dict() | {"num_experts": 8}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(contents | changes)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, r"config.json cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "holds a list, wanted an object"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, contents, message):
    if contents is not None:
        (tmp_path / "config.json").write_text(contents)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tmp_path)


def test_a_pipe_for_a_configuration_is_refused_before_anybody_waits(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_model_that_names_a_window_uses_it(family):
    """Qwens have a switch beside it; the others have none."""
    contents = hf_config(family).to_dict() | {"sliding_window": 128}
    if family == "mistral":
        contents["use_sliding_window"] = False  # which transformers does not read
    with pytest.raises(ConfigError, match="sliding_window=128 on all layers"):
        ModelConfig.from_hf(contents)


def test_a_mistral_that_says_nothing_of_a_window_has_one():
    """As transformers reads such a file."""
    contents = hf_config("mistral").to_dict()
    contents["max_position_embeddings"] = 8192
    del contents["sliding_window"]
    assert transformers.MistralConfig().sliding_window == 4096
    with pytest.raises(ConfigError, match="sliding_window=4096 on all layers"):
        ModelConfig.from_hf(contents)


def test_a_window_that_masks_nothing_is_none():
    mistral = hf_config("mistral").to_dict()
    most = mistral["max_position_embeddings"]
    assert ModelConfig.from_hf(mistral | {"sliding_window": most}) == ModelConfig.from_hf(mistral)
    qwen2 = hf_config("qwen2").to_dict()
    full = {"use_sliding_window": True, "sliding_window": 16}
    wanted = ModelConfig.from_hf(qwen2)
    assert ModelConfig.from_hf(qwen2 | full) == wanted, "layer_types decide alone"
    full |= {"layer_types": None, "max_window_layers": qwen2["num_hidden_layers"]}
    assert ModelConfig.from_hf(qwen2 | full) == wanted
    with pytest.raises(ConfigError, match="sliding_window=16 on all layers"):
        ModelConfig.from_hf(qwen2 | full | {"max_window_layers": 0})


def test_another_type_of_the_same_model_is_served():
    llama = hf_config("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}
    assert ModelConfig.from_hf(llama | {"model_type": "internlm3"}) == ModelConfig.from_hf(llama)
    assert ModelConfig.from_hf(llama | {"model_type": None}) == ModelConfig.from_hf(llama)


def test_layers_of_qwen2_with_a_window_are_refused():
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    with pytest.raises(ConfigError, match="sliding_window=64 on 1 layers"):
        ModelConfig.from_hf(hf_config("qwen2", **window))


def test_a_bias_is_qwen2s_alone():
    """Its layers have one whatever a file says, as in transformers."""
    said = {"attention_bias": True}
    for family in (*FAMILIES, "mistral"):
        contents = hf_config(family).to_dict() | said
        if family == "qwen2":
            assert ModelConfig.from_hf(contents) == ModelConfig.from_hf(hf_config(family))
            continue
        with pytest.raises(ConfigError, match="attention_bias=True: the operators serve False"):
            ModelConfig.from_hf(contents)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_head_dim_follows_from_the_sizes(family):
    contents = hf_config(family).to_dict() | {"head_dim": None, "num_attention_heads": 2}
    assert ModelConfig.from_hf(contents).head_dim == 64


@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_what_a_file_leaves_out_is_what_transformers_assumes(family):
    contents = hf_config(family).to_dict() | {"num_attention_heads": 32, "hidden_size": 2048}
    del contents["num_key_value_heads"]
    theirs = type(hf_config(family))(**contents)
    assert ModelConfig.from_hf(contents).num_kv_heads == theirs.num_key_value_heads
    named = contents | {"num_key_value_heads": None}
    assert ModelConfig.from_hf(named).num_kv_heads == 32
    assert ModelConfig.from_hf(named | {"hidden_act": "swish"}) == ModelConfig.from_hf(named)


def test_replace_is_checked():
    config = preset("qwen3-8b")
    assert config.replace(num_layers=4).num_layers == 4
    with pytest.raises(ConfigError, match="mixtral and qwen3_moe have experts"):
        config.replace(moe=MoeConfig(8, 2, 64))
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8"):
        config.replace(dtype=torch.int8)


def _title(family: str) -> str:
    return "".join(word.title() for word in family.split("_"))


@pytest.mark.parametrize(
    ("given", "want"), [(5, (5,)), ([5, 7], (5, 7)), (None, ()), ((5,), (5,)), ((), ())]
)
def test_end_tokens_are_a_tuple(given: Any, want: tuple[int, ...]):
    config = preset("qwen3-8b").replace(eos_token_ids=given)
    assert config.eos_token_ids == want
    assert hash(config) == hash(preset("qwen3-8b").replace(eos_token_ids=want))


@pytest.mark.parametrize("given", ["2", ("a",), (1.5,), (True,), 1 << 40])
def test_end_tokens_that_are_none_are_named(given: Any):
    with pytest.raises(ConfigError, match=r"eos_token_ids=.*: give a token id, a list of them"):
        preset("qwen3-8b").replace(eos_token_ids=given)
