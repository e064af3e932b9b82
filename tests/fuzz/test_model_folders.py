"""Model folders that somebody spoiled: a model that generates, or an error by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import smkern
from smkern.errors import SmkernError
from smkern.models import ModelConfig, SamplingParams, Weights
from smkern.models.loader import INDEX
from smkern.models.tokenizer import load_tokenizer
from tests.fuzz.documents import spoiled
from tests.models.fp8_checkpoints import TENSOR, compressed

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "rms_norm_eps": 1e-6,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 64, "eos_token_id": 2, "dtype": "float32",
    "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": True}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
              "continuing_subword_prefix": None, "end_of_word_suffix": None,
              "byte_fallback": False, "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3},
              "merges": [["a", "b"]]},
}  # fmt: skip
WORDS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "model_max_length": 64,
    "added_tokens_decoder": {"0": {"content": "<s>", "special": True}}, "chat_template": "{{x}}",
    "auto_map": {"AutoTokenizer": ["planted.Planted", "planted.Planted"]},
}  # fmt: skip
SHARD = "model-00001-of-00001.safetensors"
DOCUMENTS: dict[str, Any] = {
    "config.json": CONFIG,
    "generation_config.json": {"eos_token_id": [2, 3], "bos_token_id": 1},
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": WORDS,
}


class Folder(NamedTuple):
    """A model's files: its config.json, and the bytes of its safetensors file."""

    config: dict[str, Any]
    shard: bytes


QUANTIZED = {"static": compressed("channel", "tensor", dynamic=False), "tensors": TENSOR}


@pytest.fixture(scope="module", params=["plain", *QUANTIZED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    config = CONFIG
    if request.param != "plain":
        config = CONFIG | {"quantization_config": QUANTIZED[request.param]}
    path = tmp_path_factory.mktemp("model") / SHARD
    weights = Weights.random(ModelConfig.from_hf(config))
    if request.param == "tensors":  # promised
        weights = replace(weights, kv_scales=torch.ones(1, 2))
    save_file({name: tensor.clone() for name, tensor in weights.named().items()}, path)
    return Folder(config, path.read_bytes())


def header_of(shard: bytes) -> Any:
    return json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])


def with_header(shard: bytes, header: str) -> bytes:
    length = int.from_bytes(shard[:8], "little")
    words = header.encode(errors="surrogatepass")
    return len(words).to_bytes(8, "little") + words + shard[8 + length :]


def spoil(random: Random, folder: Path, model: Folder) -> None:
    """A whole folder, but for one of its files."""
    shard = model.shard
    index = {"weight_map": dict.fromkeys(header_of(shard), SHARD)}
    index["weight_map"].pop("__metadata__", None)
    files = DOCUMENTS | {"config.json": model.config, INDEX: index}
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "planted.py").write_text("from pathlib import Path\nPath('mark').touch()\n")
    (folder / SHARD).write_bytes(shard)
    wrong = random.choice([*files, SHARD, "config.json"])
    if wrong != SHARD:
        (folder / wrong).write_text(spoiled(random, files[wrong]), errors="surrogatepass")
    elif random.random() < 0.5:
        (folder / SHARD).write_bytes(with_header(shard, spoiled(random, header_of(shard))))
    else:
        at = random.randrange(len(shard))
        (folder / SHARD).write_bytes(shard[:at] + random.randbytes(random.randrange(9)))


def test_a_spoiled_folder_generates_or_is_refused_by_name(
    cases, tmp_path, monkeypatch, folder
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *said: pytest.fail(f"asked {said}"))
    for random in cases(50):
        spoil(random, tmp_path, folder)
        with suppress(SmkernError):
            llm = smkern.LLM(tmp_path, device="cpu", max_context=16, max_batch=2)
            (found,) = llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
            assert 1 <= len(found.tokens) <= 2
            llm.generate("ab", SamplingParams(max_new_tokens=2))
            llm.close()
        with suppress(SmkernError):
            load_tokenizer(tmp_path)
        assert not (tmp_path / "mark").exists()
