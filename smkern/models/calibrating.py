"""Scales of an fp8 cache from what a model's keys and values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError, ConfigError
from smkern.limits import FP8_MAX, FP8_NEGLIGIBLE, shown
from smkern.models.activations import ActivationBuffers
from smkern.models.decoder import Decoder
from smkern.models.layered import all_layers
from smkern.models.step import Step
from smkern.models.weights import Weights

ROOM = 2.0
"""How far beyond the largest that was seen fits: e4m3 is as precise for smaller numbers, down to a
14,000th of it."""
PAGE_SIZE = 16


def calibrate_kv(weights: Weights, prompts: Sequence[Sequence[int]]) -> Weights:
    """Weights with a scale for keys and one for values of each layer's fp8 cache.

    The largest magnitude in the caches of these prompts gets half of e4m3's largest; where it is
    below 2^-100 the scale is 1. Prompts run one after another, on the weights' device, and the head
    does not.

    Args:
        weights: A whole model's; not changed.
        prompts: Token ids as the model will meet them; some thousand tokens of ordinary text.

    Raises:
        ArgumentError: no prompts, or one that is no list of token ids, empty, longer than the
            model's context or holds ids outside the vocabulary.
        ConfigError: a rank's part of a model, or keys or values that are not finite.

    Example:
        >>> import torch
        >>> from smkern.models import Weights, calibrate_kv, preset
        >>> small = preset("qwen3-8b").replace(
        ...     num_layers=2, hidden_size=64, num_q_heads=2, num_kv_heads=1,
        ...     intermediate_size=96, vocab_size=32, dtype=torch.float32)
        >>> calibrate_kv(Weights.random(small), [[1, 2, 3], [5, 8]]).kv_scales.shape
        torch.Size([2, 2])
    """
    if not isinstance(weights, Weights):
        raise ConfigError(f"weights are a {type(weights).__name__}: pass Weights")
    if weights.shard.size > 1:
        raise ConfigError(
            f"weights of rank {weights.shard.rank} of {weights.shard.size}: calibrate the whole "
            "model's, and load its parts with these scales"
        )
    prompts = _checked(weights, prompts)
    longest = max(map(len, prompts))
    decoder = Decoder(weights.config, weights, max_position=longest)
    activations = ActivationBuffers(weights.config, longest, 1, decoder.device)
    most = torch.zeros(weights.config.num_layers, 2, dtype=torch.float32, device=decoder.device)
    for prompt in prompts:
        torch.maximum(most, _largest(decoder, activations, prompt), out=most)
    if not bool(most.isfinite().all()):
        raise ConfigError(
            "keys or values of these prompts are not finite: look at the weights before caches are "
            "calibrated"
        )
    # One over a smaller scale may be no finite number, which would make NaNs of the cache's zeros.
    scales = torch.where(most < FP8_NEGLIGIBLE, 1.0, most * (ROOM / FP8_MAX))
    return replace(weights, kv_scales=scales)


def _checked(weights: Weights, prompts: Any) -> list[list[int]]:
    """The prompts as lists, which may be read more than once, once all are known to be served."""
    config = weights.config
    try:
        found = [list(prompt) for prompt in prompts]
    except TypeError as reason:
        raise ArgumentError(
            f"prompts={shown(prompts)} ({reason}): pass lists of token ids"
        ) from None
    lengths = [len(prompt) for prompt in found]
    if not lengths or not 0 < min(lengths) <= max(lengths) <= config.max_position:
        raise ArgumentError(
            f"prompts of {lengths[:8]} tokens: give at least one prompt, each of 1 to "
            f"{config.max_position} tokens"
        )
    for number, prompt in enumerate(found):
        odd = [token for token in prompt if not _is_token(token, config.vocab_size)]
        if odd:
            raise ArgumentError(
                f"prompt {number} holds ids outside of 0 to {config.vocab_size - 1}, the first is "
                f"{shown(odd[0])}: use the model's own tokenizer"
            )
    return [[int(token) for token in prompt] for prompt in found]


def _is_token(token: Any, vocab_size: int) -> bool:
    try:
        return 0 <= index(token) < vocab_size
    except TypeError:  # no whole number
        return False


def _largest(decoder: Decoder, activations: ActivationBuffers, prompt: Sequence[int]) -> Tensor:
    """[num_layers, 2] fp32: the largest magnitudes in the caches of a prompt."""
    config, device, tokens = decoder.config, decoder.device, len(prompt)
    pages = -(-tokens // PAGE_SIZE)
    shape = (config.num_layers, 2, pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    caches = torch.zeros(shape, dtype=config.dtype, device=device)
    step = Step.make(
        activations,
        token_ids=torch.tensor(prompt, device=device),
        kv_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        page_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
        caches=[(layer[0], layer[1]) for layer in caches],
        max_kv_len=tokens,
        cu_q_lens=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        max_q_len=tokens,
    )
    all_layers(decoder, step.planned())
    return caches.flatten(2).abs().amax(2).float()
