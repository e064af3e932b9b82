"""fp8 weights cut over ranks: each part holds the values and the scales of its rows or columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from smkern.errors import ConfigError
from smkern.models import Decoder, ModelConfig, Quantization, Shard, TensorParallel, Weights, preset
from tests.models.fp8_checkpoints import write
from tests.models.peers import hf_config, prompts
from tests.models.ranks import on_ranks
from tests.models.session import Session
from tests.models.test_fp8_decoder import assert_rounded_alike, widened

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 200}  # fmt: skip


def _joined(parts: list[dict[str, Tensor]], name: str) -> Tensor:
    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    return torch.cat([part[name] for part in parts], dim)


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-channel", "fp8-tensor"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_parts_of_a_seed_are_of_one_model(family: str, kind: str):
    config = ModelConfig.from_hf(hf_config(family, **SIZES)).replace(dtype=torch.float32)
    whole = widened(Weights.random(config, 3, dtype=kind))  # type: ignore[arg-type]
    parts = [
        widened(Weights.random(config, 3, shard=Shard(rank, 2), dtype=kind))  # type: ignore[arg-type]
        for rank in range(2)
    ]
    for name in whole:
        if "_proj" in name:
            assert torch.equal(_joined(parts, name), whole[name]), name


@pytest.mark.parametrize("kind", ["blocks", "channels", "static"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_checkpoint_is_read_in_parts(tmp_path: Path, family: str, kind: str):
    write(tmp_path, kind, family, **SIZES)
    whole = Weights.load(tmp_path)
    parts = [Weights.load(tmp_path, shard=Shard(rank, 2)) for rank in range(2)]
    named = [widened(part) for part in parts]
    for name, want in widened(whole).items():
        if "_proj" in name:
            assert torch.equal(_joined(named, name), want), name
    for part in parts:
        for cut, layer in zip(part.layers, whole.layers, strict=True):
            for got, want in zip(cut.scales.tensors(), layer.scales.tensors(), strict=True):
                assert want.dim() == 2 or torch.equal(got, want)  # of inputs


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_ranks_compute_what_one_does(family: str):
    """A rank's columns are whole blocks, so inputs round as they do on one."""
    moe = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    given = hf_config(family, **SIZES, **moe, num_hidden_layers=1)
    config = ModelConfig.from_hf(given).replace(dtype=torch.float32)
    texts, blocks = prompts((5, 2, 9), 200), "fp8-block"

    def logits(tp: TensorParallel | None = None) -> Tensor:
        shard = Shard() if tp is None else tp.shard
        weights = Weights.random(config, 3, shard=shard, dtype=blocks)  # type: ignore[arg-type]
        quantized = config.replace(quantization=Quantization(blocks))  # type: ignore[arg-type]
        return Session.make(Decoder(quantized, weights, tp=tp), len(texts)).logits(texts)

    found, _, _ = on_ranks(2, logits)
    assert torch.equal(found[0], found[1])
    assert_rounded_alike(found[0], logits())


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-channel", "fp8-tensor"])
def test_layers_in_two_pieces_of_rows(kind: str):
    """Values and scales are cut alike."""
    given = hf_config("qwen3", **SIZES, num_hidden_layers=2)
    config = ModelConfig.from_hf(given).replace(dtype=torch.float32)
    quantized = config.replace(quantization=Quantization(kind))  # type: ignore[arg-type]
    texts = prompts((5, 2, 9), 200)

    def logits(tp: TensorParallel) -> Tensor:
        weights = Weights.random(config, 3, shard=tp.shard, dtype=kind)  # type: ignore[arg-type]
        return Session.make(Decoder(quantized, weights, tp=tp), len(texts)).logits(texts)

    whole, _, _ = on_ranks(2, logits)
    cut, _, sums = on_ranks(2, logits, cuts=11)
    assert ("send", 11) in sums.log
    assert_rounded_alike(cut[0], whole[0])


def test_a_part_is_made_of_whole_blocks():
    config = preset("qwen3-8b").replace(num_layers=1, vocab_size=64)
    part = Weights.empty(
        config.replace(quantization=Quantization("fp8-block")), "meta", Shard(1, 8)
    )
    assert part.layers[0].gate_up.shape == (2 * 12_288 // 8, 4096)
    with pytest.raises(ConfigError, match="intermediate_size=192 with quantization 'fp8-block'"):
        Weights.random(config.replace(intermediate_size=768), shard=Shard(0, 4), dtype="fp8-block")
