"""Weights from safetensors: single files, shards, fused experts, and files that are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smkern.errors import ConfigError, WeightsError
from smkern.models import Decoder, ModelConfig, MoeLayer, Weights
from tests.models.peers import Peer, assert_same, hf_config, make_peer, prompts, rewrite
from tests.models.session import Session

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _shard(peer: Peer, folder: Path) -> list[Path]:
    peer.model.save_pretrained(folder, max_shard_size="200KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert (folder / INDEX).is_file()
    return files


def test_a_folder_gives_the_models_logits(peer: Peer, folder: Path):
    weights = Weights.load(folder, progress=True)
    text = prompts((30,))
    got = Session.make(Decoder(weights.config, weights), 1).logits(text)
    want = peer.last_logits(text, torch.float32)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_a_mistral_gives_its_logits(tmp_path: Path):
    peer = make_peer("mistral")
    peer.model.save_pretrained(tmp_path)
    test_a_folder_gives_the_models_logits(peer, tmp_path)


def test_shards_and_a_single_file_are_the_same(peer: Peer, folder: Path, tmp_path: Path):
    shards = tmp_path / "shards"
    _shard(peer, shards)
    assert_same(Weights.load(folder), Weights.load(shards))


def test_tensors_of_a_model_in_memory_are_the_same(peer: Peer, folder: Path):
    """transformers 5 holds the experts of a layer in two tensors."""
    loaded = Weights.load(folder)
    assert_same(loaded, Weights.from_tensors(loaded.config, peer.model.state_dict()))
    assert_same(loaded, Weights.from_tensors(loaded.config, loaded.named()))


def test_conversion_is_asked_for(folder: Path):
    weights = Weights.load(folder, dtype=torch.bfloat16)
    assert {x.dtype for x in weights.tensors()} == {torch.bfloat16}
    assert weights.config.dtype is torch.bfloat16
    contents = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(contents | {"dtype": "float16"}))
    with pytest.raises(WeightsError, match=r"is torch.float32, the configuration says .*float16"):
        Weights.load(folder)


@pytest.mark.parametrize("value", [1e5, -65520.0])
def test_values_beyond_fp16_are_not_made_infinite(folder: Path, value: float):
    tensors = load_file(folder / SINGLE)
    tensors[NORM][3] = 65504.0
    save_file(tensors, folder / SINGLE)
    assert Weights.load(folder, dtype=torch.float16).final_norm[3] == 65504
    tensors[NORM][3] = value
    save_file(tensors, folder / SINGLE)
    with pytest.raises(WeightsError, match=rf"{NORM} in .*{value:g}.* ends at 65504: convert"):
        Weights.load(folder, dtype=torch.float16)
    assert Weights.load(folder, dtype=torch.bfloat16).final_norm[3].isfinite()


def test_fewer_layers_of_a_larger_file(folder: Path):
    config = ModelConfig.from_hf(folder).replace(num_layers=1)
    one, all_layers = Weights.load(folder, config=config), Weights.load(folder)
    assert torch.equal(one.layers[0].qkv, all_layers.layers[0].qkv)
    assert len(one.layers) == 1


def test_a_tied_head_is_the_embedding(tmp_path: Path):
    peer = make_peer("qwen3", tie_word_embeddings=True)
    peer.model.save_pretrained(tmp_path)
    weights = Weights.load(tmp_path)
    assert weights.lm_head is weights.embed
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    rewrite(tmp_path, lambda t: t.update({head: t[embed].clone()}))
    assert_same(weights, Weights.load(tmp_path))
    rewrite(tmp_path, lambda t: t.pop(embed))
    assert_same(weights, Weights.load(tmp_path))


def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path: Path):
    """transformers uses such a head: whoever wrote the file meant one of the two."""
    peer = make_peer("qwen3", tie_word_embeddings=True)
    peer.model.save_pretrained(tmp_path)
    other = torch.ones_like(Weights.load(tmp_path).embed)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": other}))
    with pytest.raises(WeightsError, match=r"lm_head\.weight in .* set that to false"):
        Weights.load(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(contents | {"tie_word_embeddings": False}))
    assert torch.equal(Weights.load(tmp_path).lm_head, other)


def test_names_that_say_nothing_are_passed_over(folder: Path):
    want = Weights.load(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: torch.zeros(32)}))
    assert_same(want, Weights.load(folder))


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
CHANGES = {
    "missing": (lambda t: t.pop(Q), rf"lacks 1 tensor: {Q}: "),
    "extra": (lambda t: t.update({"a.bias": torch.zeros(2)}), r"has 1 tensor: a\.bias that a"),
    "shape": (
        lambda t: t.update({Q: torch.zeros(256, 64)}),
        rf"{Q} in .* has shape \[256, 64\], the configuration wants \[256, 128\]",
    ),
    "dtype": (lambda t: t.update({NORM: t[NORM].half()}), rf"{NORM} in .* is torch\.float16"),
    "integers": (lambda t: t.update({NORM: t[NORM].char()}), r"is torch\.int8.*not quantized"),
    "none": (lambda t: t.clear(), r"has 0 tensors, the configuration 2 layers"),
    "many": (
        lambda t: [t.pop(name) for name in list(t)[2:]],
        r"lacks \d+ tensors: model.layers.0.input.* \d+ more",
    ),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1_000_000}, r"has \d+ tensors, the configuration 1000000 layers"),
        ({"num_hidden_layers": 2**31}, r"num_layers=2147483648: give a whole number of 1 to"),
        ({"vocab_size": 200_000}, r"has shape .199, 128., the configuration wants .200000,"),
        ({"num_attention_heads": 2**24}, r"the configuration wants .*1073741824"),
    ],
)
def test_a_configuration_is_compared_before_memory_is_taken(folder, monkeypatch, changes, message):
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | changes))
    made, empty = [], Weights.empty
    monkeypatch.setattr(
        Weights,
        "empty",
        lambda config, device, *a, **b: made.append(device) or empty(config, device, *a, **b),
    )
    with pytest.raises((WeightsError, ConfigError), match=message):
        Weights.load(folder)
    assert set(made) <= {"meta"}


@pytest.mark.parametrize("what", CHANGES)
def test_tensors_that_do_not_fit_are_named(folder: Path, what):
    change, message = CHANGES[what]
    rewrite(folder, change)
    with pytest.raises(WeightsError, match=message):
        Weights.load(folder)


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_biases_that_do_not_fit_are_named(tmp_path: Path, name: str):
    """A Qwen2 has those of queries, keys and values, others have none."""
    bias = f"model.layers.1.self_attn.{name}.bias"
    for family in ("qwen2", "llama"):
        folder = tmp_path / family
        make_peer(family).model.save_pretrained(folder)
        lacks = family == "qwen2" and name == "q_proj"
        rewrite(folder, lambda t: t.pop(bias) if lacks else t.update({bias: torch.zeros(256)}))  # noqa: B023
        with pytest.raises(WeightsError, match=f"{'lacks' if lacks else 'has'} 1 tensor: {bias}"):
            Weights.load(folder)


@pytest.mark.parametrize("kept", [0, 4, 300, -1])
def test_a_truncated_file_is_named(folder: Path, kept):
    contents = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(contents[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated, corrupt"):
        Weights.load(folder)


def test_a_corrupt_header_is_named(folder: Path):
    contents = bytearray((folder / SINGLE).read_bytes())
    contents[8:40] = b"\xff" * 32
    (folder / SINGLE).write_bytes(contents)
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated, corrupt"):
        Weights.load(folder)


def test_folders_without_weights(folder: Path):
    (folder / SINGLE).unlink()
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor"):
        Weights.load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"but 1 file: pytorch_model\.bin: make safetensors"):
        Weights.load(folder)
    for shard in (1, 2):
        (folder / f"model-0000{shard}-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"but 2 files: model-00001-of.*: download the index"):
        Weights.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        Weights.load(folder)


class TestShards:
    @pytest.fixture
    def shards(self, peer: Peer, tmp_path: Path) -> Path:
        _shard(peer, tmp_path)
        return tmp_path

    def _index(self, folder: Path, change) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    def test_an_index_counts_whatever_a_shard_is_called(self, shards: Path):
        """Not the shard that was read last, where two hold a tensor."""
        want = Weights.load(shards)
        first, last = min(shards.glob("*.safetensors")), max(shards.glob("*.safetensors"))
        first.rename(shards / SINGLE)
        name = next(iter(load_file(shards / SINGLE)))
        save_file(load_file(last) | {name: torch.zeros(3)}, last)
        self._index(shards, lambda m: m.update({k: SINGLE for k in m if m[k] == first.name}))
        assert_same(want, Weights.load(shards))

    def test_a_missing_shard_is_named(self, shards: Path):
        first = min(shards.glob("*.safetensors"))
        first.unlink()
        with pytest.raises(WeightsError, match=f"{first.name} is missing, {INDEX} names it"):
            Weights.load(shards)

    def test_a_truncated_shard_is_named(self, shards: Path):
        last = max(shards.glob("*.safetensors"))
        last.write_bytes(last.read_bytes()[:-7])
        with pytest.raises(WeightsError, match=f"{last.name} is truncated"):
            Weights.load(shards)

    def test_an_index_that_promises_what_a_shard_lacks(self, shards: Path):
        self._index(shards, lambda m: m.update({"ghost.weight": max(m.values())}))
        with pytest.raises(WeightsError, match=r"promises 1 tensor: ghost\.weight"):
            Weights.load(shards)

    def test_a_shard_that_holds_what_the_index_does_not_list(self, shards: Path):
        self._index(shards, lambda m: m.pop(NORM))
        with pytest.raises(WeightsError, match=rf"hold 1 tensor: {NORM} that"):
            Weights.load(shards)

    @pytest.mark.parametrize("file", ["../secret.safetensors", ["x"], {}, 5, None])
    def test_an_index_that_leads_out_of_the_folder(self, shards: Path, file):
        self._index(shards, lambda m: m.update({NORM: file}))
        with pytest.raises(WeightsError, match="wanted one of its own folder"):
            Weights.load(shards)

    @pytest.mark.parametrize("contents", ["{", "[]", "{}", '{"weight_map": 3}'])
    def test_an_index_that_is_none(self, shards: Path, contents):
        (shards / INDEX).write_text(contents)
        with pytest.raises(WeightsError, match=INDEX):
            Weights.load(shards)


def test_random_weights_follow_from_the_seed():
    config = ModelConfig.from_hf(hf_config("qwen3_moe")).replace(initializer_range=0.05)
    one, same, other = (Weights.random(config, seed) for seed in (1, 1, 2))
    assert_same(one, same)
    assert not torch.equal(one.embed, other.embed)
    layer = one.layers[1]
    assert isinstance(layer, MoeLayer)
    assert layer.w_gate_up.float().std().item() == pytest.approx(0.05, rel=0.02)
    assert layer.q_norm is not None
    assert layer.q_norm.eq(1).all()
    bias = Weights.random(ModelConfig.from_hf(hf_config("qwen2"))).layers[1].qkv_bias
    assert bias is not None
    assert bias.float().std().item() == pytest.approx(0.08, rel=0.1)


def test_weights_of_another_model_are_refused():
    config = ModelConfig.from_hf(hf_config("llama"))
    weights = Weights.random(config)
    with pytest.raises(ConfigError, match="load them with this configuration"):
        Decoder(config.replace(rms_eps=1e-3), weights)
