"""A model cut over ranks computes what it computes whole; ranks here are threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smkern.errors import ArgumentError, ConfigError, WeightsError
from smkern.models import Decoder, ModelConfig, Shard, TensorParallel, Weights
from tests.models.peers import FAMILIES, hf_config, make_peer, prompts
from tests.models.ranks import on_ranks
from tests.models.session import Session

pytestmark = pytest.mark.slow

# qwen3 has 199 tokens in the other tests, which no number of ranks divides
EVEN = {"vocab_size": 200}


def config_of(family: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(family, **EVEN | changes)).replace(dtype=torch.float32)


def logits_of(decoder: Decoder) -> torch.Tensor:
    """Of prompts, chunks behind them, and greedy decode steps: [steps, batch, vocab]."""
    session = Session.make(decoder, 3)
    found = [session.logits(prompts([5, 1, 17], 200)), session.logits(prompts([3, 9, 2], 200))]
    for _ in range(4):
        drawn = found[-1].argmax(-1).tolist()
        found.append(session.logits([[token] for token in drawn], ragged=False))
    return torch.stack(found)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_one_does(family: str, size: int) -> None:
    peer = make_peer(family, **EVEN)
    config, state = config_of(family), peer.model.state_dict()
    with torch.inference_mode():
        alone = logits_of(Decoder(config, Weights.from_tensors(config, state)))

    def run(tp: TensorParallel) -> torch.Tensor:
        weights = Weights.from_tensors(config, state, shard=tp.shard)
        return logits_of(Decoder(config, weights, tp=tp))

    found, decode, prefill = on_ranks(size, run)
    assert all(torch.equal(found[0], logits) for logits in found[1:])
    torch.testing.assert_close(found[0], alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0].argmax(-1), alone.argmax(-1))
    # embed, two a layer, logits
    assert (prefill.calls, decode.calls) == (2 * 6, 4 * 6)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_layers_in_two_pieces_of_rows(family: str) -> None:
    """One piece is sent while the other's products run; experts take all rows."""
    config, texts = config_of(family), prompts([5, 1, 17], 200)
    state = make_peer(family, **EVEN).model.state_dict()

    def run(tp: TensorParallel) -> torch.Tensor:
        weights = Weights.from_tensors(config, state, shard=tp.shard)
        return Session.make(Decoder(config, weights, tp=tp), 3).logits(texts)

    whole, _, sums = on_ranks(2, run)
    layers, layer = config.num_layers - 1, 2 * [("send", 23), ("add", 23)]
    last = [*2 * [("send", 3), ("add", 3)], ("add", 3)]  # behind attention, and the logits
    assert sums.log == [("add", 23), *layers * layer, *last]
    cut, _, sums = on_ranks(2, run, cuts=16)
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(cut[0], cut[1])
    if family == "qwen3":
        layer = [("send", 16), ("send", 7), ("add", 16), ("send", 16), ("add", 7), ("send", 7)]
        layer += [("add", 16), ("add", 7)]
        assert sums.log == [("add", 23), *layers * layer, *last]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (8, 1, 8), (6, 2, 2), (6, 3, 3), (12, 2, 6)],
)
def test_heads_of_all_kinds(heads: int, kv_heads: int, size: int) -> None:
    config = config_of("qwen3", num_hidden_layers=1, head_dim=64, hidden_size=96).replace(
        num_q_heads=heads, num_kv_heads=kv_heads, intermediate_size=240, vocab_size=240
    )
    with torch.inference_mode():
        alone = Session.make(Decoder(config, Weights.random(config, 3)), 2)
        want = alone.logits([[5, 6, 7], [8]])

    def run(tp: TensorParallel) -> torch.Tensor:
        decoder = Decoder(config, Weights.random(config, 3, shard=tp.shard), tp=tp)
        assert decoder.config.num_q_heads == heads // size
        assert decoder.config.num_kv_heads == max(kv_heads // size, 1)
        return Session.make(decoder, 2).logits([[5, 6, 7], [8]])

    found, _, _ = on_ranks(size, run)
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-4)


def test_parts_of_random_weights_make_up_the_whole() -> None:
    for family, tied in (("qwen2", True), ("qwen3", True), ("qwen3_moe", False)):
        config = config_of(family).replace(tied=tied, num_kv_heads=1)
        whole = Weights.random(config, 5).named()
        parts = [Weights.random(config, 5, shard=Shard(rank, 2)).named() for rank in range(2)]
        assert all(part.keys() == whole.keys() for part in parts)
        for name, tensor in whole.items():
            pieces = [part[name] for part in parts]
            if any(x in name for x in ("norm", "mlp.gate.", "k_proj", "v_proj")):
                assert all(torch.equal(tensor, piece) for piece in pieces), name
                continue
            dim = 1 if any(x in name for x in ("o_proj", "down_proj")) else 0
            assert torch.equal(tensor, torch.cat(pieces, dim)), name


def test_a_rank_reads_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3_moe"):
        peer = make_peer(family, **EVEN)
        peer.model.save_pretrained(tmp_path / family)
        config = config_of(family)
        for rank in range(2):
            shard = Shard(rank, 2)
            loaded = Weights.load(tmp_path / family, config=config, shard=shard)
            given = Weights.from_tensors(config, peer.model.state_dict(), shard=shard)
            for one, other in zip(loaded.tensors(), given.tensors(), strict=True):
                assert torch.equal(one, other)


def test_a_checkpoint_is_compared_whole_before_anything_is_cut() -> None:
    peer = make_peer("llama", **EVEN)
    tensors = dict(peer.model.state_dict())
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, ::2]  # just one rank's width
    with pytest.raises(WeightsError, match=r"down_proj.*shape"):
        Weights.from_tensors(config_of("llama"), tensors, shard=Shard(0, 2))


def test_sizes_that_ranks_cannot_share_are_named() -> None:
    config = config_of("llama")
    with pytest.raises(ConfigError, match=r"tp=3 .*num_q_heads=4.*vocab_size=200.*num_kv_heads=2"):
        Weights.random(config, shard=Shard(0, 3))
    with pytest.raises(ConfigError, match="num_kv_heads=4"):
        Shard(0, 6).config(config.replace(num_q_heads=12, num_kv_heads=4, vocab_size=600))
    with pytest.raises(ConfigError, match="moe intermediate_size=96"):
        Shard(0, 64).config(config_of("qwen3_moe"))
    with pytest.raises(ArgumentError, match="rank=2"):
        Shard(2, 2)
    with pytest.raises(ArgumentError, match="size=65"):
        Shard(0, 65)
    with pytest.raises(ArgumentError, match="rank="):
        Shard(10**5000, 2)
    with pytest.raises(ArgumentError, match="size="):
        Shard(0, torch.tensor(2))  # type: ignore[arg-type]


def test_weights_of_another_rank_are_refused() -> None:
    config = config_of("llama")
    tp = TensorParallel(0, 2)
    with pytest.raises(ConfigError, match="rank=1"):
        Decoder(config, Weights.random(config, shard=Shard(1, 2)), tp=tp)
    with pytest.raises(ConfigError, match=r"shard=tp\.shard"):
        Decoder(config, Weights.random(config), tp=tp)
    with pytest.raises(ConfigError, match="leave tp out"):
        Decoder(config, Weights.random(config, shard=Shard(0, 2)))
