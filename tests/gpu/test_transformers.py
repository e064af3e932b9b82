"""transformers' models with our attention on a GPU, in bf16, beside eager ones and fp32 ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import smkern
import smkern.integrations.transformers as st
from smkern.errors import ArgumentError
from smkern.integrations.transformers.attention import Attention
from smkern.integrations.transformers.mask import StepMask
from tests.integrations.families import FAMILIES, model_of, padded, prompts

pytestmark = pytest.mark.filterwarnings("error:a mask:RuntimeWarning")  # no fallback to sdpa
LAYER = torch.nn.Identity()
ALL_EXPERTS = {"num_experts_per_tok": 4}
"""A token's experts then do not depend on rounding."""
WINDOW = {"sliding_window": 48}


@pytest.fixture(autouse=True)
def _registered() -> None:
    from transformers import logging

    logging.set_verbosity_error()
    st.register()


def changes_of(family: str) -> dict[str, Any]:
    changes: dict[str, Any] = ALL_EXPERTS if family in ("Qwen3Moe", "GptOss") else {}
    return changes | (WINDOW if "sliding_window" in FAMILIES[family] else {})


@cache
def models(family: str) -> dict[str, Any]:
    """ "ours" and "eager" in bf16, "truth" in fp32, all of the same bf16 weights."""
    changes = changes_of(family)
    found = {
        "ours": model_of(family, "smkern", **changes).to("cuda", torch.bfloat16),
        "eager": model_of(family, "eager", **changes).to("cuda", torch.bfloat16),
        "truth": model_of(family, "eager", **changes).to("cuda", torch.bfloat16).float(),
    }
    for model in found.values():
        if hasattr(model, "set_experts_implementation") and "num_experts_per_tok" in changes:
            model.set_experts_implementation("eager")
    return found


def check_errors(family: str, run: Callable[[Any], Tensor]) -> None:
    """Our distance from the fp32 run is at most 1.2 times eager's."""
    with torch.no_grad():
        logits = {name: run(model).float() for name, model in models(family).items()}
    truth = logits.pop("truth")
    errors = {name: float((x - truth).norm() / truth.norm()) for name, x in logits.items()}
    assert torch.isfinite(truth).all()
    assert errors["ours"] <= 1.2 * errors["eager"] + 1e-4, errors


@pytest.mark.parametrize(
    ("length", "pads"), [(301, None), (320, None), (301, [0, 100, 290])], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt(family: str, length: int, pads: list[int] | None) -> None:
    ids = prompts(3, length)
    mask = None if pads is None else padded(ids, pads).cuda()
    counts = torch.ones(3, length).bool().cuda() if mask is None else mask.bool()
    check_errors(family, lambda m: m(ids.cuda(), attention_mask=mask).logits[counts])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pads", [None, [0, 20, 70]])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decoded_tokens(family: str, pads: list[int] | None, static: bool) -> None:
    """A prompt of 80 tokens, a chunk of 23, then 24 tokens one by one, over one cache."""
    from transformers import DynamicCache, StaticCache

    ids = prompts(3, 127).cuda()
    mask = None if pads is None else padded(ids.cpu(), pads).cuda()

    def run(model: Any) -> Tensor:
        config = model.config
        past = (
            StaticCache(config=config, max_cache_len=256) if static else DynamicCache(config=config)
        )
        begin, found = 0, []
        for end in (80, 103, *range(104, 128)):
            seen = None if mask is None else mask[:, :end]
            out = model(ids[:, begin:end], attention_mask=seen, past_key_values=past)
            if begin:
                found.append(out.logits)
            begin = end
        return torch.cat(found, 1)

    check_errors(family, run)


def check_tokens(tokens: Tensor, start: int, mask: Tensor) -> None:
    """Each token from `start` on is the fp32 model's best, or within rounding of it."""
    seen = torch.cat([mask, mask.new_ones(tokens.shape[0], tokens.shape[1] - start)], 1)
    with torch.no_grad():
        logits = models("Llama")["truth"](tokens, attention_mask=seen).logits[:, start - 1 : -1]
    chosen = logits.gather(2, tokens[:, start:, None])[..., 0]
    assert bool((logits.max(-1).values - chosen <= 0.05 * logits.abs().max()).all())


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pads", [None, [0, 5, 30]])
def test_generated_tokens(pads: list[int] | None, static: bool) -> None:
    ids = prompts(3, 40)
    mask = torch.ones_like(ids) if pads is None else padded(ids, pads)
    tokens = models("Llama")["ours"].generate(
        ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=24, do_sample=False,
        cache_implementation="static" if static else None, disable_compile=True,
    )  # fmt: skip
    assert tokens.shape == (3, 64)
    check_tokens(tokens, 40, mask.cuda())


@pytest.mark.slow
def test_a_static_cache_with_the_compilation_that_generate_does_itself() -> None:
    ids = prompts(2, 40).cuda()
    tokens = models("Llama")["ours"].generate(
        ids, max_new_tokens=16, do_sample=False, cache_implementation="static"
    )
    check_tokens(tokens, 40, torch.ones_like(ids))


class Cache:
    """The tensors of a layer and a decode step's call, without a model around them."""

    def __init__(self, room: int, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.q = torch.randn(4, 8, 1, 128, device="cuda", dtype=dtype)
        self.k, self.v = torch.randn(2, 4, 2, room, 128, device="cuda", dtype=dtype)
        self.padding = (
            torch.arange(room, device="cuda") >= torch.tensor([[0], [3], [9], [40]]).cuda()
        )
        self.attention = Attention()

    def step(self, past: Any, keys: int, *, pads: bool = False, copy: bool = False) -> Tensor:
        """One token over `past` others, in a cache of so many keys; two layers."""
        mask = self.attention.mask(
            4, 1, keys, past, attention_mask=self.padding[:, :keys] if pads else None,
            device=self.q.device,
        )  # fmt: skip
        assert isinstance(mask, StepMask)
        k, v = (x[:, :, :keys] for x in (self.k, self.v))
        if copy:  # as a cache that grows by concatenation
            k, v = k.clone(), v.clone()
        for _ in range(2):
            out = self.attention.attend(LAYER, self.q, k, v, mask)[0]
        return out

    def wanted(self, past: int, *, pads: bool = False) -> Tensor:
        """The same in fp32, as [batch, 1, heads, head_dim]."""
        q, k, v = (x.float() for x in (self.q, self.k[:, :, : past + 1], self.v[:, :, : past + 1]))
        seen = self.padding[:, None, None, : past + 1] if pads else None
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return out.transpose(1, 2)


@pytest.mark.parametrize("pads", [False, True])
def test_a_growing_cache_compiles_and_keeps_nothing(pads: bool) -> None:
    """Decode steps of other lengths; within a bucket of 512 keys the plan stays the same too."""
    cache = Cache(512)
    for past in (300, 301):
        cache.step(past, past + 1, pads=pads, copy=True)
    torch.cuda.synchronize()
    before, allocated = smkern.counters(), torch.cuda.memory_allocated()
    for past in range(302, 366):
        out = cache.step(past, past + 1, pads=pads, copy=True)
        wanted = cache.wanted(past, pads=pads)
        torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-3)
        del out, wanted
    assert smkern.counters() == before
    # a step's own vectors may differ by a block or two of the allocator
    assert torch.cuda.memory_allocated() <= allocated + 8192


@pytest.mark.parametrize("pads", [False, True])
def test_a_static_step_reads_nothing_back(pads: bool) -> None:
    cache = Cache(512)
    past = torch.tensor(300, device="cuda")
    cache.step(past, 512, pads=pads)
    torch.cuda.synchronize()
    before, allocated = smkern.counters(), torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            past.add_(1)
            out = cache.step(past, 512, pads=pads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.float(), cache.wanted(320, pads=pads), rtol=2e-2, atol=2e-3)
    del out
    assert smkern.counters() == before
    assert torch.cuda.memory_allocated() <= allocated + 8192


@pytest.mark.parametrize("pads", [False, True])
def test_a_graph_of_a_static_step(pads: bool) -> None:
    """Mask, plan and attention in one graph, which follows the length on the device."""
    cache = Cache(512)
    past = torch.tensor(100, device="cuda")
    cache.step(past, 512, pads=pads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.step(past, 512, pads=pads)
    for length in (60, 255, 256, 510):
        past.fill_(length)
        out.fill_(torch.nan)
        graph.replay()
        wanted = cache.wanted(length, pads=pads)
        torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-3)
        eager = cache.step(past, 512, pads=pads)
        assert torch.equal(eager, out)


def test_the_same_bits_in_a_partition() -> None:
    from copy import deepcopy

    cache = Cache(2048)
    whole = cache.step(2000, 2001)
    # cuBLAS launches clusters, which a partition of spread SMs cannot
    model = deepcopy(models("Llama")["ours"])
    st.swap_linear(model)
    torch.cuda.synchronize()
    with smkern.ladder([32]) as ladder:
        for partition in ladder.split(decode=32):
            with partition:
                part = cache.step(2000, 2001)
                tokens = model.generate(prompts(2, 30).cuda(), max_new_tokens=4, do_sample=False)
            partition.synchronize()
            assert torch.equal(part, whole)
            assert tokens.shape == (2, 34)


def test_linear_layers() -> None:
    from copy import deepcopy

    found = models("Qwen3")
    ours = deepcopy(found["ours"])
    assert len(st.swap_linear(ours)) == 15
    ids = prompts(3, 100).cuda()
    with torch.no_grad():
        truth = found["truth"](ids).logits
        errors = [(m(ids).logits.float() - truth).norm() for m in (ours, found["eager"])]
    assert errors[0] <= 1.2 * errors[1]


def test_fp32_is_refused() -> None:
    cache = Cache(32, torch.float32)
    with pytest.raises(ArgumentError, match=r"use torch\.bfloat16 or torch\.float16"):
        cache.step(20, 21)
