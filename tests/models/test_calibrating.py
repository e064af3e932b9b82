"""Scales of an fp8 cache from a model's own keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from smkern.errors import ArgumentError, ConfigError
from smkern.models import Decoder, ModelConfig, Shard, Weights, calibrate_kv
from tests.models.peers import Peer, hf_config, prompts
from tests.models.session import Session

FP8 = torch.float8_e4m3fn


def _largest(peer: Peer, text: list[int]) -> torch.Tensor:
    """[layers, 2]: the largest of transformers' cached keys and values."""
    with torch.no_grad():
        cache = peer.model(torch.tensor([text]), use_cache=True).past_key_values
    return torch.tensor([[x.keys.abs().max(), x.values.abs().max()] for x in cache.layers])


def test_scales_hold_twice_what_was_seen(peer: Peer):
    texts = prompts((40, 7, 19))
    weights = calibrate_kv(peer.decoder().weights, texts)
    want = torch.stack([_largest(peer, text) for text in texts]).amax(0) * 2 / 448
    assert weights.kv_scales is not None
    torch.testing.assert_close(weights.kv_scales, want, rtol=1e-4, atol=0)


def test_caches_far_outside_of_e4m3_are_served():
    config = ModelConfig.from_hf(hf_config("llama")).replace(dtype=torch.float32)
    plain = Weights.random(config.replace(initializer_range=0.08), 2)
    for layer in plain.layers:
        layer.qkv[-config.kv_size :].mul_(5000)
        layer.o.div_(5000)
    texts = prompts((30, 11))

    def logits(weights: Weights, dtype: torch.dtype) -> torch.Tensor:
        return Session.make(Decoder(weights.config, weights), len(texts), cache_dtype=dtype).logits(
            texts
        )

    want = logits(plain, torch.float32)
    assert (logits(calibrate_kv(plain, texts), FP8) - want).norm() < 0.1 * want.norm()
    assert (logits(plain, FP8) - want).norm() > 0.2 * want.norm()


def test_values_that_are_zero_keep_their_scale():
    config = ModelConfig.from_hf(hf_config("llama")).replace(dtype=torch.float32)
    weights = Weights.random(config)
    weights.layers[0].qkv[-config.kv_size :].zero_()
    scales = calibrate_kv(weights, [[1, 2]]).kv_scales
    assert scales is not None
    assert scales[0, 1] == 1
    assert scales[0, 0] < 1


def test_values_next_to_nothing_make_no_nan_of_zeros():
    """One over their scale would be infinite, and that times zero NaN."""
    config = ModelConfig.from_hf(hf_config("llama")).replace(dtype=torch.float32)
    weights = Weights.random(config)
    values = weights.layers[0].qkv[-config.kv_size :]
    values.mul_(1e-38)
    values[1].zero_()
    made = calibrate_kv(weights, [[1, 2]])
    assert made.kv_scales is not None
    assert made.kv_scales[0, 1] == 1
    session = Session.make(Decoder(config, made), 1, cache_dtype=FP8)
    assert bool(session.logits([[1, 2, 3]]).isfinite().all())


def test_prompts_may_be_read_once():
    config = ModelConfig.from_hf(hf_config("llama")).replace(dtype=torch.float32)
    weights, texts = Weights.random(config), [[1, 2, 3], [5, 8]]
    want = calibrate_kv(weights, texts).kv_scales
    made = calibrate_kv(weights, (iter(text) for text in texts)).kv_scales  # type: ignore[misc]
    assert made is not None
    assert want is not None
    assert torch.equal(made, want)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"prompts of \[\] tokens: give at least one"),
        ([[1], []], r"prompts of \[1, 0\] tokens"),
        ([[1] * 513], r"prompts of \[513\] tokens: .* 1 to 512 tokens"),
        ([[1], [199]], r"prompt 1 holds ids outside of 0 to 198"),
        ([[1, 1.5]], r"prompt 0 holds ids outside of 0 to 198, the first is 1\.5: use"),
        (["a text"], r"prompt 0 holds ids outside of 0 to 198, the first is 'a': use"),
        ([1, 2], r"prompts=\[1, 2\] \(.*\): pass lists of token ids"),
        (None, r"prompts=None \(.*\): pass lists of token ids"),
    ],
)
def test_prompts_that_cannot_run(given: Any, message: str):
    config = ModelConfig.from_hf(hf_config("llama")).replace(dtype=torch.float32)
    with pytest.raises(ArgumentError, match=message):
        calibrate_kv(Weights.random(config), given)


def test_weights_that_cannot_be_calibrated():
    config = ModelConfig.from_hf(hf_config("llama", vocab_size=200)).replace(dtype=torch.float32)
    with pytest.raises(ConfigError, match="weights of rank 1 of 2: calibrate the whole"):
        calibrate_kv(Weights.random(config, shard=Shard(1, 2)), [[1]])
    with pytest.raises(ConfigError, match="weights are a list"):
        calibrate_kv([], [[1]])  # type: ignore[arg-type]
    broken = replace(Weights.random(config))
    broken.layers[1].qkv[-1].fill_(float("inf"))
    with pytest.raises(ConfigError, match="keys or values of these prompts are not finite"):
        calibrate_kv(broken, [[1, 2]])
