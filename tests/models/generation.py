"""A tiny model whose greedy tokens differ from prompt to prompt, and ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from smkern import LLM
from smkern.models import Decoder, ModelConfig, SamplingParams, Step, Weights, preset
from tests.runtime.alone import Alone

VOCAB = 64


def tiny(architecture: str = "qwen3-8b", **changes: Any) -> ModelConfig:
    """Two layers of a family, in fp32."""
    given: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_q_heads": 2, "num_kv_heads": 1,
        "intermediate_size": 96, "vocab_size": VOCAB, "dtype": torch.float32, "max_position": 256,
        "eos_token_ids": (), "initializer_range": 0.2,
    }  # fmt: skip
    return preset(architecture).replace(**given | changes)


def make_llm(model: Any = None, **options: Any) -> LLM:
    """An LLM on the CPU that holds few tokens, of a config, a folder or a name.

    A step takes as many as its pages hold: the default is buffers of 25 MB to fill with zeros.
    """
    given: dict[str, Any] = {
        "device": "cpu", "num_pages": 64, "max_batch": 8, "max_step_tokens": 1024, "seed": 3,
    }  # fmt: skip
    return LLM(tiny() if model is None else model, **given | options)


def greedy(max_new_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **options)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def one_at_a_time(
    config: ModelConfig, prompts: list[list[int]], params: list[SamplingParams]
) -> list[tuple[int, ...]]:
    """The tokens of each prompt by itself."""
    alone = Alone(Decoder(config, Weights.random(config, 3)), config.max_position)
    return [tuple(alone.generate(*asked)) for asked in zip(prompts, params, strict=True)]


def assert_nothing_leaked(llm: LLM) -> None:
    llm.pool.check()
    assert llm.pool.requests == ()
    assert llm.pool.usage.held == 0


@contextmanager
def failing_layers(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, fails: Callable[[int], bool]
) -> Iterator[None]:
    """Layers raise at the calls, counted from 0, that `fails` says."""
    calls, layer = count(), Decoder.layer

    def layer_or_error(self: Decoder, index: int, step: Step) -> torch.Tensor:
        if fails(next(calls)):
            raise error
        return layer(self, index, step)

    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "layer", layer_or_error)
        yield


class Letters:
    """A tokenizer of one letter a token: 0 is "a"; 26 and above are special, but for two bytes of a
    character at 40 and 41."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        text, at = "", 0
        while at < len(token_ids):
            token = token_ids[at]
            if token == 40 and token_ids[at + 1 : at + 2] == [41]:
                text += "é"
                at += 1
            elif token in (40, 41):
                text += "�"
            elif token < 26:
                text += chr(ord("a") + token)
            at += 1
        return text


class Raising(Letters):
    """Raises at the text of one token."""

    def __init__(self, token: int = -1) -> None:
        self.token = token

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if self.token in token_ids:
            raise UnicodeError("planted")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


class Torn(Letters):
    """A tokenizer whose tokens are bytes that may end inside a character."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self._parts[token] for token in token_ids).decode(errors="replace")
