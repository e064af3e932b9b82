"""Tokens through the runtime against each request alone, and that a wrong one is found."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from smkern import LLM
from smkern.bench.runtime.workload import Sizes
from smkern.models import Decoder, Weights
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.device import SimDevice
from tests.models.generation import tiny
from tests.runtime import equality
from tests.runtime.alone import each_alone, pool_of, workload
from tests.runtime.equality import Equality, check_tokens, clear_mismatches, serve_and_compare
from tests.runtime.policies import RandomPolicy
from tests.runtime.world import RUNGS, Linear

pytestmark = pytest.mark.slow

CONFIG = tiny(max_position=128)
SIZES = Sizes(
    (16, 48), max_running=6, max_prefill=3, max_tokens=48, max_context=96, num_pages=20,
    batch_invariant=True,
)  # fmt: skip


@cache
def weights() -> Weights:
    return Weights.random(CONFIG, 3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimDevice:
    """A device on whose clock the workloads wait."""
    made = SimDevice(132, RUNGS, Linear(), decode_launch_us=1.0, prefill_launch_us=1.5)
    monkeypatch.setattr(equality.time, "sleep", lambda seconds: made.spend(1e6 * seconds))
    return made


def multiplexer(decoder: Decoder, device: SimDevice, **options: Any) -> Multiplexer:
    executor = ModelExecutor(
        decoder, pool_of(CONFIG, 12, reuse=False), device=device, max_running=6,
        max_prefill=3, max_tokens=64, max_context=128,
    )  # fmt: skip
    return Multiplexer(executor, batch_invariant=decoder.batch_invariant, **options)


def test_a_workload_is_the_same_each_time() -> None:
    asked = workload(1, 50, 64, longest=40, answer=9)
    assert asked == workload(1, 50, 64, longest=40, answer=9)
    assert asked != workload(2, 50, 64, longest=40, answer=9)
    assert max(len(one.prompt) for one in asked) == 40
    assert all(1 <= one.params.max_new_tokens <= 9 for one in asked)
    assert any(one.cancel_after is not None for one in workload(1, 200, 64))


def test_alone_is_what_a_user_gets() -> None:
    asked = workload(5, 6, CONFIG.vocab_size, longest=60, answer=12)
    llm = LLM(CONFIG, weights=weights(), device="cpu", num_pages=64, max_batch=1)
    truth = each_alone(Decoder(CONFIG, weights()), asked, 128)
    for one, wanted in zip(asked, truth, strict=True):
        assert list(llm.generate([list(one.prompt)], one.params)[0].tokens) == wanted


@pytest.mark.parametrize("preemption", ["recompute", "keep"])
def test_tokens_are_those_of_each_request_alone(device: SimDevice, preemption: Any) -> None:
    decoder = Decoder(CONFIG, weights(), batch_invariant=True)
    asked = workload(4, 16, CONFIG.vocab_size, longest=60, answer=16)
    mux = multiplexer(decoder, device, policy=RandomPolicy(1), preemption=preemption)
    verdict, tokens = serve_and_compare(mux, asked, each_alone(decoder, asked, 128))
    assert verdict.is_equal, verdict
    assert verdict.tokens == sum(map(len, tokens))
    assert mux.stats().preemptions


def test_a_wrong_token_is_found(device: SimDevice) -> None:
    decoder = Decoder(CONFIG, weights())
    asked = workload(4, 10, CONFIG.vocab_size, longest=30, answer=6, greedy=True)
    truth = each_alone(decoder, asked, 128)
    index = next(i for i, one in enumerate(asked) if one.cancel_after is None and len(truth[i]) > 2)
    truth[index][2] += 1
    verdict, _ = serve_and_compare(multiplexer(decoder, device), asked, truth)
    assert (verdict.mismatches, verdict.wrong) == (1, [(index, 2)])


def test_what_rounding_does_not_decide(device: SimDevice) -> None:
    decoder = Decoder(CONFIG, weights())
    other = Decoder(CONFIG, weights(), batch_invariant=True)
    asked = workload(4, 10, CONFIG.vocab_size, longest=30, answer=6, greedy=True)
    _, tokens = serve_and_compare(multiplexer(decoder, device), asked, [[] for _ in asked])
    differ, clear = clear_mismatches(decoder, other, asked, tokens, max_context=128)
    assert differ == 0
    assert 0.6 * sum(map(len, tokens)) < clear <= sum(map(len, tokens))
    wrong = [[(token + 1) % CONFIG.vocab_size for token in given] for given in tokens]
    assert clear_mismatches(decoder, other, asked, wrong, max_context=128)[0] > len(asked) // 2


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_run_of_the_gpu_s_workloads_in_miniature(is_fast: bool) -> None:
    wanted = Equality(12, layers=2, sizes=SIZES, longest=40, is_fast=is_fast)
    verdict = check_tokens(weights(), wanted)
    assert verdict.is_equal, verdict
    assert verdict.tokens > 24
    assert bool(verdict.clear) is is_fast
    assert bool(verdict.switches) is not is_fast
