"""Tokens through the Multiplexer on a GPU are those of each request alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import smkern
from smkern.bench.runtime.equality import (
    Asked,
    clear_mismatches,
    each_alone,
    pool_for,
    through,
    workload,
)
from smkern.bench.runtime.random_policy import RandomPolicy
from smkern.models import Decoder, ModelConfig, Weights, preset
from smkern.runtime.model_executor import ModelExecutor
from smkern.runtime.multiplexer import Multiplexer

RUNGS = (16, 48, 96)
CONTEXT = 1024
RUNNING = 48


@contextmanager
def runtime(decoder: Decoder, seed: int, *, pages: int = 320) -> Iterator[Multiplexer]:
    """A Multiplexer that does anything that is allowed, on few pages."""
    pool = pool_for(decoder.config, decoder.device, 16 * pages)
    with smkern.ladder(RUNGS) as ladder:
        executor = ModelExecutor(
            decoder, pool, ladder=ladder, max_running=RUNNING, max_prefill=8, max_tokens=2048,
            max_context=CONTEXT,
        )  # fmt: skip
        executor.warm()
        executor.capture(contexts=[CONTEXT])
        mux = Multiplexer(
            executor,
            policy=RandomPolicy(seed),
            batch_invariant=decoder.batch_invariant,
            preemption="recompute" if seed % 2 else "keep",
        )
        try:
            yield mux
        finally:
            mux.close()
            executor.synchronize()
            del mux, executor


def check_equal(decoder: Decoder, asked: list[Asked], seeds: range) -> None:
    """Each part of a workload with another policy and way to preempt."""
    truth = each_alone(decoder, asked, max_context=CONTEXT)
    assert len({tuple(tokens) for tokens in truth}) > len(asked) // 2, "they say the same"
    part = -(-len(asked) // len(seeds))
    preemptions = 0
    for at, seed in enumerate(seeds):
        mine = slice(at * part, (at + 1) * part)
        with runtime(decoder, seed) as mux:
            verdict, _ = through(mux, asked[mine], truth[mine], seed)
            preemptions += mux.stats().preemptions
            mux._executor.pool.check()
            assert mux._executor.pool.usage.held == 0
        print(f"seed {seed}: {verdict}")
        assert not verdict.failed
        assert verdict.is_equal, f"{verdict.mismatches} tokens; (request, token) {verdict.wrong}"
        assert verdict.cancelled
    assert preemptions, "pages never ran out"


def test_four_layers_of_8b(request: pytest.FixtureRequest) -> None:
    """2,000 requests."""
    config = preset("qwen3-8b").replace(num_layers=4, max_position=CONTEXT)
    decoder = Decoder(config, Weights.random(config, 5, "cuda"), batch_invariant=True)
    check_equal(decoder, workload(1, 2000, config.vocab_size), range(4))


def test_all_of_8b() -> None:
    """100 requests."""
    config = preset("qwen3-8b").replace(max_position=CONTEXT)
    decoder = Decoder(config, Weights.random(config, 5, "cuda"), batch_invariant=True)
    check_equal(decoder, workload(2, 100, config.vocab_size), range(2))


def test_the_fast_mode_is_right_wherever_rounding_does_not_decide() -> None:
    config: ModelConfig = preset("qwen3-8b").replace(num_layers=4, max_position=CONTEXT)
    weights = Weights.random(config, 5, "cuda")
    fast = Decoder(config, weights)
    exact = Decoder(config, weights, batch_invariant=True)
    asked = workload(3, 200, config.vocab_size, greedy=True)
    with runtime(fast, 7) as mux:
        verdict, tokens = through(mux, asked, [[] for _ in asked], 7)
    assert not verdict.failed
    differ, clear = clear_mismatches(fast, exact, asked, tokens, max_context=CONTEXT)
    assert clear > verdict.tokens // 4, f"{clear} of {verdict.tokens} tokens are clear"
    assert not differ, f"{differ} of {clear} tokens that rounding does not decide"
    torch.cuda.empty_cache()
