"""Whole models of transformers with our attention against their eager one, in fp32 on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.integrations.families import FAMILIES, padded, pair_of, prompts

pytestmark = [
    pytest.mark.filterwarnings("error::RuntimeWarning"),  # no fallback to sdpa
    pytest.mark.slow,
]
CACHES = [None, "static"]


@cache
def pair(family: str) -> tuple[Any, Any]:
    return pair_of(family)


def close(ours: torch.Tensor, eager: torch.Tensor) -> None:
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits(family: str) -> None:
    eager, ours = pair(family)
    ids = prompts(3, 21)
    close(ours(ids).logits, eager(ids).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_with_padding(family: str, side: str) -> None:
    eager, ours = pair(family)
    ids = prompts(3, 21)
    mask = padded(ids, [0, 5, 20])
    mask = mask if side == "left" else mask.flip(1)
    counts = mask.bool()
    got, wanted = (m(ids, attention_mask=mask).logits for m in (ours, eager))
    close(got[counts], wanted[counts])


@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("pads", [None, [0, 3, 10]])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, pads: list[int] | None, cache_kind: str | None) -> None:
    eager, ours = pair(family)
    ids = prompts(3, 11)
    mask = None if pads is None else padded(ids, pads)
    tokens = [
        model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False,
            cache_implementation=cache_kind,
        )
        for model in (ours, eager)
    ]  # fmt: skip
    assert tokens[0].tolist() == tokens[1].tolist()
    assert len(tokens[0][:, 11:].unique()) > 5


@pytest.mark.parametrize("pads", [None, [0, 3]])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_prefill_in_chunks(family: str, static: bool, pads: list[int] | None) -> None:
    """Chunks of 7, 6 and 1 tokens over one cache; sliding layers fill theirs on the way."""
    from transformers import DynamicCache, StaticCache

    eager, ours = pair(family)
    ids = prompts(2, 14)
    mask = None if pads is None else padded(ids, pads)
    wanted = eager(ids, attention_mask=mask).logits
    config = ours.config
    cache = StaticCache(config=config, max_cache_len=32) if static else DynamicCache(config=config)
    begin = 0
    for end in (7, 13, 14):
        seen = None if mask is None else mask[:, :end]
        got = ours(ids[:, begin:end], attention_mask=seen, past_key_values=cache).logits
        counts = torch.ones(2, end - begin) if mask is None else mask[:, begin:end]
        close(got[counts.bool()], wanted[:, begin:end][counts.bool()])
        begin = end


@torch.no_grad()
def test_second_turn_behind_padding_on_the_right() -> None:
    """Padding of a first turn lies amid the keys of the second; no page table entry names it."""
    from transformers import DynamicCache

    eager, ours = pair("Llama")
    ids, lengths = prompts(2, 9), [5, 2]
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]) | (torch.arange(9) >= 5)
    outs = []
    for model in (ours, eager):
        past = DynamicCache(config=model.config)
        model(ids[:, :5], attention_mask=mask[:, :5].long(), past_key_values=past)
        outs.append(model(ids[:, 5:], attention_mask=mask.long(), past_key_values=past).logits)
    close(*outs)


def test_beams_and_assisted_generation() -> None:
    eager, ours = pair("Llama")
    ids = prompts(1, 12)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        tokens = [
            m.generate(ids, max_new_tokens=12, do_sample=False, **options) for m in (ours, eager)
        ]
        assert tokens[0].tolist() == tokens[1].tolist()


@torch.no_grad()
def test_encoder_with_padding() -> None:
    from transformers import AutoModel, BertConfig

    config = {
        "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 64, "vocab_size": 97,
    }  # fmt: skip
    ours = AutoModel.from_config(BertConfig(**config), attn_implementation="smkern").eval()
    eager = AutoModel.from_config(BertConfig(**config), attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    ids = prompts(3, 10)
    mask = padded(ids, [0, 3, 9]).flip(1)
    mask[0, 4] = 0  # bidirectional: padding may be anywhere
    close(*(m(ids, attention_mask=mask).last_hidden_state for m in (ours, eager)))


def test_torch_compile_of_a_static_cache() -> None:
    from transformers import CompileConfig

    eager, ours = pair("Gemma2")
    ids = prompts(2, 9)
    mask = padded(ids, [0, 4])
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    got = ours.generate(ids, cache_implementation="static", compile_config=compiled, **options)
    assert got.tolist() == eager.generate(ids, **options).tolist()
