"""Models in fp8 and fp8 pools behind `LLM` and `serve`, on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import smkern
from smkern import LLM
from smkern.errors import ArgumentError, ConfigError
from smkern.models import Decoder, ModelConfig, Weights, calibrate_kv, quantize
from smkern.models.loader import SINGLE
from smkern.models.shard import WHOLE
from smkern.runtime.loading import find_weights
from tests.models.fp8_checkpoints import CONFIGS, SIZES, write
from tests.models.generation import greedy, make_llm, random_prompts, tiny
from tests.models.peers import assert_same, hf_config
from tests.runtime.alone import pool_of

pytestmark = pytest.mark.slow

FP8 = torch.float8_e4m3fn
WIDE = {"hidden_size": 128, "intermediate_size": 128}
PROMPTS = random_prompts([9, 30, 14])


def _tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(x.tokens) for x in llm.generate(PROMPTS, greedy())]


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-channel", "fp8-tensor"])
def test_random_weights_in_fp8(kind: Any):
    config = tiny(**WIDE)
    llm = make_llm(config, dtype=kind)
    weights = Weights.random(config, 3, dtype=kind)
    assert llm.config == weights.config
    assert _tokens(llm) == _tokens(make_llm(weights.config, weights=weights))
    assert _tokens(llm) != _tokens(make_llm(config, seed=4, dtype=kind))


@pytest.mark.parametrize("kind", ["blocks", "static channels"])
def test_a_folder_in_fp8(tmp_path: Path, kind: str):
    write(tmp_path, kind)
    llm = make_llm(tmp_path)
    assert llm.config.quantization == CONFIGS[kind][1]
    weights = Weights.load(tmp_path)
    assert _tokens(llm) == _tokens(make_llm(weights.config, weights=weights))
    with pytest.raises(ConfigError, match="dtype='fp8-tensor' of a checkpoint that is 'fp8-"):
        make_llm(tmp_path, dtype="fp8-tensor")


def test_a_folder_is_quantized_when_it_is_loaded(tmp_path: Path):
    config = hf_config("qwen3", **SIZES, dtype="float32")
    config.save_pretrained(tmp_path)
    plain = Weights.random(ModelConfig.from_hf(config), 5)
    named = {name: x.clone() for name, x in plain.named().items()}
    save_file(named, tmp_path / "model.safetensors")
    llm = make_llm(tmp_path, dtype="fp8-block")
    assert_same(llm.decoder.weights, quantize(plain, "fp8-block"))
    assert len(_tokens(llm)) == 3


def test_norms_of_another_dtype_are_converted_as_the_rest_is_quantized(tmp_path: Path):
    config = hf_config("qwen3", **SIZES, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    plain = Weights.random(ModelConfig.from_hf(config), 5)
    named = {k: x.float() if "norm" in k else x.clone() for k, x in plain.named().items()}
    save_file(named, tmp_path / "model.safetensors")
    llm = make_llm(tmp_path, dtype="fp8-channel")
    assert llm.config.dtype is torch.bfloat16
    assert_same(llm.decoder.weights, quantize(plain, "fp8-channel"))


def test_fp32_on_a_gpu_is_refused_before_it_is_loaded_or_made_bf16_beside_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, gpu = tiny(**WIDE), torch.device("cuda:0")
    assert config.dtype is torch.float32
    for folder in (tmp_path, None):
        with pytest.raises(ConfigError, match=r"float32 on cuda:0: .* --dtype bfloat16"):
            find_weights(config, folder, gpu, None, None, 0, WHOLE)
    asked: list[Any] = []
    made = Weights.random(config)
    monkeypatch.setattr(Weights, "load", lambda *_, **how: asked.append(how) or made)
    find_weights(config, tmp_path, gpu, None, "fp8-channel", 0, WHOLE)
    find_weights(config, tmp_path, gpu, torch.float16, None, 0, WHOLE)
    assert [(x["dtype"], x["config"].dtype) for x in asked] == [
        (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)
    ]  # fmt: skip


def test_weights_made_of_a_folders_are_served_with_it(tmp_path: Path):
    """Quantized and calibrated, though config.json knows neither that nor all tokens that end."""
    config = hf_config("qwen3", **SIZES, dtype="float32", eos_token_id=5)
    config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    plain = Weights.random(ModelConfig.from_hf(config), 5)
    save_file({name: x.clone() for name, x in plain.named().items()}, tmp_path / SINGLE)
    loaded = Weights.load(tmp_path)
    assert _tokens(make_llm(tmp_path, weights=loaded)) == _tokens(make_llm(tmp_path))
    made = calibrate_kv(quantize(loaded, "fp8-channel"), PROMPTS)
    for dtype in (None, "fp8-channel"):
        llm = make_llm(tmp_path, weights=made, dtype=dtype, kv_dtype=FP8)
        assert llm.config.eos_token_ids == (5, 7)
        assert llm.config.quantization == made.config.quantization
        assert llm.decoder.weights is made
        assert len(_tokens(llm)) == 3


def test_given_weights_are_of_the_dtype_that_is_asked_for():
    plain = Weights.random(tiny(), 3)
    made = quantize(plain, "fp8-channel")
    with pytest.raises(ConfigError, match=r"not quantized: pass .*quantize\(weights, 'fp8-tensor"):
        make_llm(weights=plain, dtype="fp8-tensor")
    with pytest.raises(ConfigError, match="'fp8-tensor' with weights that are 'fp8-channel'"):
        make_llm(weights=made, dtype="fp8-tensor")


def test_a_pool_in_fp8():
    config = tiny(**WIDE, dtype=torch.bfloat16)
    llm, wide = make_llm(config, kv_dtype=FP8), make_llm(config)
    assert llm.pool.sizes.page_bytes * 2 == wide.pool.sizes.page_bytes
    assert [len(tokens) for tokens in _tokens(llm)] == [12, 12, 12]


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-tensor"])
def test_tokens_served_in_fp8_depend_on_the_request_alone(kind: Any):
    """Weights and pool in fp8, scales of the cache other than 1: together as one at a time."""
    config = tiny(**WIDE, dtype=torch.bfloat16)
    scales = torch.tensor([[0.5, 0.25], [0.125, 2.0]])
    weights = replace(Weights.random(config, 3, dtype=kind), kv_scales=scales)
    decoder = Decoder(weights.config, weights, batch_invariant=True)

    def served(prompts: list[list[int]]) -> list[tuple[int, ...]]:
        pool = pool_of(config, 64, dtype=FP8, reuse=False)
        mux = smkern.serve(decoder, pool, max_running=8, max_tokens=128)
        handles = [mux.submit(prompt, greedy()) for prompt in prompts]
        for _ in mux.run():
            pass
        mux.close()
        return [tuple(handle.tokens) for handle in handles]

    together = served(PROMPTS)
    assert together == [served([prompt])[0] for prompt in PROMPTS]
    assert len(set(together)) == 3


def test_dtypes_that_are_not_served():
    with pytest.raises(ArgumentError, match=r"dtype='fp8': pass a torch.dtype, one of"):
        make_llm(tiny(), dtype="fp8")
    with pytest.raises(ArgumentError, match=r"pass a torch\.dtype, one of"):
        make_llm(tiny(), dtype=np.zeros(2))
    with pytest.raises(ConfigError, match="hidden_size=64 with quantization 'fp8-block'"):
        make_llm(tiny(), dtype="fp8-block")
    for dtype in (torch.float16, "fp8"):
        with pytest.raises(ArgumentError, match=r"kv_dtype=.* of a model in torch.float32: pass"):
            make_llm(tiny(), kv_dtype=dtype)
