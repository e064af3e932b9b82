"""Families whose tensors have other names, or whose layers are another's: as transformers' run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smkern.errors import ArgumentError, ConfigError, WeightsError
from smkern.models import Decoder, ModelConfig, Shard, TensorParallel, Weights, quantize
from smkern.models.names import BESIDE_TEXT
from tests.models.fp8_checkpoints import CONFIGS, compressed, write
from tests.models.peers import Peer, assert_same, hf_config, make_peer, prompts, rewrite
from tests.models.ranks import on_ranks
from tests.models.session import Session
from tests.models.test_fp8_decoder import assert_rounded_alike

pytestmark = pytest.mark.slow

FAMILIES = ("internlm3", "mistral3", "mixtral", "phi3", "seed_oss")
COUNTS = (37, 5, 80)
LIKE = {"internlm3": "llama"}
EVEN: dict[str, Any] = {"vocab_size": 200}
BLOCKS = EVEN | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
                 "num_key_value_heads": 4}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def peer(request: pytest.FixtureRequest) -> Peer:
    torch.manual_seed(7)
    return make_peer(request.param, **EVEN)


@pytest.fixture
def folder(peer: Peer, tmp_path: Path) -> Path:
    peer.model.save_pretrained(tmp_path)
    return tmp_path


def logits_of(weights: Weights, config: ModelConfig, tp: TensorParallel | None = None) -> Any:
    """Of prompts, and of a token behind each."""
    session = Session.make(Decoder(config, weights, tp=tp), len(COUNTS))
    first = session.logits(prompts(COUNTS, 200))
    return torch.stack([first, session.logits([[5], [9], [77]], ragged=False)])


def assert_close(got: torch.Tensor, peer: Peer) -> None:
    texts = prompts(COUNTS, 200)
    behind = [[*text, token] for text, token in zip(texts, (5, 9, 77), strict=True)]
    want = torch.stack([peer.last_logits(x, torch.float32) for x in (texts, behind)])
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_a_folder_gives_the_models_logits(peer: Peer, folder: Path):
    weights = Weights.load(folder)
    assert weights.config.architecture == LIKE.get(peer.family, peer.family)
    assert_close(logits_of(weights, weights.config), peer)


def test_shards_and_tensors_in_memory_are_the_same(peer: Peer, folder: Path, tmp_path: Path):
    want = Weights.load(folder)
    shards = tmp_path / "shards"
    peer.model.save_pretrained(shards, max_shard_size="200KB")
    assert len([*shards.glob("*.safetensors")]) > 2
    for got in (Weights.load(shards), Weights.from_tensors(want.config, peer.model.state_dict())):
        assert_same(want, got)
    assert_same(want, Weights.from_tensors(want.config, want.named()))


def test_a_tied_head_is_the_embedding(peer: Peer, tmp_path: Path):
    tied = make_peer(peer.family, **EVEN, tie_word_embeddings=True)
    tied.model.save_pretrained(tmp_path)
    weights = Weights.load(tmp_path)
    assert weights.lm_head is weights.embed
    assert_close(logits_of(weights, weights.config), tied)


def test_what_is_missing_is_named_as_the_files_name_it(peer: Peer, folder: Path):
    names = [x for x in Weights.load(folder).named() if ".layers.1." in x]
    for name in names if peer.family != "mistral3" else ():
        kept: dict[str, torch.Tensor] = {}
        rewrite(folder, lambda t: kept.update({name: t.pop(name)}))  # noqa: B023
        with pytest.raises(WeightsError, match=rf"lacks 1 tensor: {name}"):
            Weights.load(folder)
        rewrite(folder, lambda t: t.update(kept))  # noqa: B023


def test_dynamic_rope_is_plain_up_to_its_own_context():
    """As InternLM3's, whose published files name a class of their own."""
    contents = hf_config("internlm3", **EVEN).to_dict()
    published = contents | {"architectures": ["InternLM3ForCausalLM"]}
    config = ModelConfig.from_hf(published)
    assert config == ModelConfig.from_hf(contents)
    assert config.rope.scaling is None
    peer = make_peer("internlm3", **EVEN)
    weights = Weights.from_tensors(config.replace(dtype=torch.float32), peer.model.state_dict())
    texts = prompts([config.max_position], 200)
    got = Session.make(Decoder(weights.config, weights), 1, config.max_position).logits(texts)
    torch.testing.assert_close(got, peer.last_logits(texts, torch.float32), rtol=2e-4, atol=2e-4)
    with pytest.raises(ArgumentError, match="max_position=513: the model's context has 512"):
        Decoder(weights.config, weights, max_position=513)


def test_a_wrapped_text_model_by_all_its_names(tmp_path: Path):
    """Also where lists of what is not quantized name the head, and a tensor is there twice."""
    contents = hf_config("mistral3").to_dict()
    heads = ["language_model.lm_head", "re:vision_tower.*"]
    quantized = {"quantization_config": compressed("channel", "token", ignore=heads)}
    found = ModelConfig.from_hf(contents | quantized).quantization
    assert found is not None
    assert found.kind == "fp8-channel"
    make_peer("mistral3").model.save_pretrained(tmp_path)
    wrapped = "language_model.model.norm.weight"
    rewrite(tmp_path, lambda t: t.update({"model.norm.weight": t[wrapped].clone()}))
    with pytest.raises(WeightsError, match=rf"has 1 tensor: {wrapped} that a mistral3 model"):
        Weights.load(tmp_path)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_does(peer: Peer, folder: Path, size: int):
    """With fewer KV heads than ranks, too."""
    whole = Weights.load(folder)
    alone = logits_of(whole, whole.config)

    def run(tp: TensorParallel) -> torch.Tensor:
        weights = Weights.load(folder, shard=tp.shard)
        assert_same(weights, Weights.from_tensors(whole.config, whole.named(), shard=tp.shard))
        return logits_of(weights, whole.config, tp)

    for found in on_ranks(size, run)[0]:
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_checkpoints(tmp_path: Path, family: str, kind: str):
    """What is written is loaded, whole and in parts, and made of bf16 it computes the same."""
    tensors = write(tmp_path, kind, family, **BLOCKS)
    weights = Weights.load(tmp_path)
    assert weights.config.quantization == CONFIGS[kind][1]
    named = weights.named()
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.")
        assert name in named or BESIDE_TEXT.match(name) or "scale" in name
        if name in named and tensor.dim() == 2:
            assert torch.equal(named[name].float(), tensor.float()), name

    def run(tp: TensorParallel) -> torch.Tensor:
        return logits_of(Weights.load(tmp_path, shard=tp.shard), weights.config, tp)

    found, _, _ = on_ranks(2, run)
    assert torch.equal(found[0], found[1])
    if CONFIGS[kind][1].kind == "fp8-block":  # whose inputs round alike on any number of ranks
        assert_rounded_alike(found[0][0], logits_of(weights, weights.config)[0])


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-channel", "fp8-tensor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_quantized_and_cut(family: str, kind: Any):
    config = ModelConfig.from_hf(hf_config(family, **BLOCKS)).replace(dtype=torch.float32)
    whole = quantize(Weights.random(config, 4), kind)
    assert_same(whole, Weights.random(config, 4, dtype=kind))
    for rank in range(2):
        part = Weights.random(config, 4, shard=Shard(rank, 2), dtype=kind)
        again = Weights.from_tensors(whole.config, whole.named(), shard=Shard(rank, 2))
        assert_same(part, again)


def leaves(name: str) -> dict[str, Any]:
    return {"quantization_config": compressed("channel", "token", ignore=["lm_head", name])}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "internlm3": [
        ({"bias": True}, "bias=True: the operators serve False"),
        ({"qkv_bias": True}, "qkv_bias=True: the operators serve False"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "type 'dynamic' has no factor"),
    ],
    "mistral3": [
        ({"text_config": None}, "text_config of model_type None: there is 'mistral'"),
        ({"text_config": {"model_type": "ministral3"}}, "model_type 'ministral3'"),
        (leaves("language_model.model.layers.1.mlp.up_proj"), r"1\.mlp\.up_proj unquantized"),
        (leaves("re:model[.]language_model.*q_proj"), r"0\.self_attn\.q_proj unquantized"),
    ],
    "mixtral": [
        ({"sliding_window": 64}, "sliding_window=64 on all layers"),
        ({"num_local_experts": None}, "num_local_experts=None"),
        (leaves("model.layers.0.block_sparse_moe.experts.0.w2"), r"experts\.0\.w2 unquantized"),
        (leaves("re:.*experts.*w3"), r"experts\.0\.w3 unquantized"),
    ],
    "phi3": [
        ({"sliding_window": 64}, "sliding_window=64 on all layers"),
        ({"sliding_window": 64, "use_sliding_window": False}, "sliding_window=64"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE of phi3 scaled by Yarn"),
        (
            {"partial_rotary_factor": 0.75, "rope_parameters": None},
            "the heads of phi3 rotate whole",
        ),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
    "seed_oss": [
        ({"attention_bias": False}, "attention_bias=False: the operators serve True"),
        ({"attention_out_bias": True}, "attention_out_bias=True: the operators serve False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"head_dim": None}, "head_dim is missing"),
    ],
}


@pytest.mark.parametrize(
    ("family", "changes", "message"), [(x, *row) for x, rows in REFUSED.items() for row in rows]
)
def test_what_cannot_be_served_is_named(family: str, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(hf_config(family).to_dict() | changes)
