"""Decoders in fp8 on the GPU: as exact as plain torch that rounds alike, and every mode of bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import smkern
from smkern.models import (
    Decoder,
    ModelConfig,
    Quantization,
    SamplingParams,
    Weights,
    calibrate_kv,
    quantize,
)
from tests.gpu.models.support import MOST, decode_graph
from tests.models.fp8_checkpoints import SIZES
from tests.models.peers import FAMILIES, hf_config, prompts
from tests.models.session import Session
from tests.models.test_fp8_decoder import KINDS, distance, exact
from tests.runtime.alone import pool_of

FP8 = torch.float8_e4m3fn
TEXTS = tuple(range(2, 130, 6))
COUNTS = (5, 64, 100)


def _config(family: str) -> ModelConfig:
    moe = {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    given = hf_config(family, **SIZES, max_position_embeddings=1024, **moe)
    return ModelConfig.from_hf(given).replace(dtype=torch.bfloat16)


def _weights(family: str, kind: Any, device: str = "cuda") -> Weights:
    """Random weights, drawn on the CPU, so that both devices have the same."""
    made = quantize(Weights.random(_config(family), 5), "fp8-tensor" if kind == "static" else kind)
    config, named = made.config, made.named()
    if kind == "static":
        config = config.replace(quantization=Quantization("fp8-tensor", "static"))
        linears = [name for name in named if name.endswith("_proj.weight")]
        named |= {x.replace(".weight", ".input_scale"): torch.tensor(8 / 448) for x in linears}
    return Weights.from_tensors(config, named, device=device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_quantized_as_on_the_cpu(family: str, kind: Any):
    drawn = Weights.random(_config(family), 5)
    there = Weights.from_tensors(drawn.config, drawn.named(), device="cuda")
    pairs = zip(quantize(there, kind).tensors(), quantize(drawn, kind).tensors(), strict=True)
    for got, want in pairs:
        assert torch.equal(got.cpu().float(), want.float())


@pytest.mark.parametrize("kind", [*KINDS, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_err_as_plain_torch_does(family: str, kind: Any):
    """Prompts and a decode step; both against the fp32 model that the weights stand for."""
    here, there = _weights(family, kind, "cpu"), _weights(family, kind)
    texts = prompts(TEXTS)
    wide = exact(replace(here, config=here.config.replace(dtype=torch.float32)))
    want, ours, theirs = (
        Session.make(Decoder(weights.config, weights), len(texts))
        for weights in (wide, there, here)
    )
    for chunks, ragged in (([x[:-1] for x in texts], True), ([x[-1:] for x in texts], False)):
        truth = want.logits(chunks, ragged=ragged)
        got = ours.logits(chunks, ragged=ragged).cpu()
        assert distance(got, truth) <= 1.2 * distance(theirs.logits(chunks, ragged=ragged), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_the_request_alone(kind: Any):
    weights = _weights("qwen3", kind)
    decoder, texts = Decoder(weights.config, weights, batch_invariant=True), prompts(COUNTS)
    together = Session.make(decoder, len(texts)).logits(texts)
    for index, text in enumerate(texts):
        assert torch.equal(Session.make(decoder, 1).logits([text])[0], together[index])
    with smkern.ladder([16]) as ladder:
        session = Session.make(decoder, len(texts))
        step = session.step(texts)
        torch.cuda.synchronize()
        partition = ladder.split(decode=16).decode
        with partition:
            got = decoder.forward(step)
        partition.synchronize()
        assert torch.equal(got.float(), together)
        del step, session, got


@pytest.mark.parametrize("cache", [None, FP8])
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_allocate_and_load_nothing(family: str, cache: torch.dtype | None):
    weights = calibrate_kv(_weights(family, "fp8-block"), prompts(COUNTS))
    decoder = Decoder(weights.config, weights)
    session = Session.make(decoder, len(COUNTS), MOST, cache_dtype=cache)
    first = session.logits(prompts(COUNTS)).argmax(-1)
    graph = decode_graph(session, first)
    graph.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"], smkern.counters()
    graph.replay(20)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["allocation.all.allocated"], smkern.counters()
    assert after == before
    assert bool(graph.logits.isfinite().all())
    graph.close()


@pytest.mark.parametrize("cache", [torch.bfloat16, FP8])
def test_served_tokens_depend_on_the_request_alone(cache: torch.dtype):
    weights = calibrate_kv(_weights("qwen3", "fp8-block"), prompts(COUNTS))
    config = weights.config
    decoder = Decoder(config, weights, batch_invariant=True)
    texts = prompts([9 + 7 * i for i in range(24)])
    greedy = SamplingParams(max_new_tokens=12, ignore_eos=True)

    def served(max_running: int) -> list[list[int]]:
        pool = pool_of(config, 1024, device="cuda", dtype=cache, reuse=False)
        mux = smkern.serve(decoder, pool, max_running=max_running, max_tokens=512, max_context=512)
        handles = [mux.submit(text, greedy) for text in texts]
        for _ in mux.run():
            pass
        mux.close()
        return [list(handle.tokens) for handle in handles]

    together = served(24)
    assert together == served(2)
    assert all(len(tokens) == 12 for tokens in together)
