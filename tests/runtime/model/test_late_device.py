"""Tokens are those of each prompt alone where the device is behind the host by any distance."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from smkern.models import Decoder, SamplingParams, Weights
from smkern.policies import Chunked, StaticSplit
from smkern.runtime import ModelExecutor, Multiplexer
from smkern.runtime.model.reads import ROOMS
from tests.models.generation import one_at_a_time, random_prompts, tiny
from tests.runtime.alone import pool_of
from tests.runtime.model.late_device import LateDevice, make_late
from tests.runtime.policies import RandomPolicy

pytestmark = pytest.mark.slow

NEW, CONTEXT = 16, 64
PROMPTS = random_prompts([5, 3, 9, 4, 17, 30], seed=11)
CONFIG = tiny()
STEPS = 1_000
"""Until all is served, at most; it takes some 40."""
POOLS = {"plenty": (1, 600), "few": (1, 50), "few large": (16, 7)}
"""Size and number of pages; few hold little more than the longest request alone."""
POLICIES: dict[str, Any] = {
    "chunks": lambda draw: Chunked(),
    "a split": lambda draw: StaticSplit(32, steps=draw.randint(1, 5)),
    "random": lambda draw: RandomPolicy(draw.randrange(100)),
}


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    params = [SamplingParams(NEW)] * len(PROMPTS)
    return [list(tokens) for tokens in one_at_a_time(CONFIG, PROMPTS, params)]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights.random(CONFIG, 3)


class Served:
    """What was asked of a runtime, and what must come of it."""

    def __init__(self, mux: Multiplexer, alone: list[list[int]], draw: Random) -> None:
        self._mux = mux
        self._alone = alone
        self._draw = draw
        self.asked: list[tuple[Any, list[int]]] = []

    def submit(self) -> None:
        """A prompt; some end by a token that they will draw."""
        draw, index = self._draw, self._draw.randrange(len(PROMPTS))
        expected = self._alone[index][: draw.choice([NEW, NEW, 7, 2])]
        stops = (draw.choice(self._alone[index]),) if draw.random() < 0.3 else ()
        params = SamplingParams(len(expected), stop_token_ids=stops)
        handle = self._mux.submit(PROMPTS[index], params, priority=draw.choice([0, 0, 1]))
        ends = [at for at, token in enumerate(expected) if token in stops]
        self.asked.append((handle, expected[: ends[0] + 1] if ends else expected))

    def change(self) -> None:
        """Somebody may come, or leave; at times all leave at once."""
        draw = self._draw
        if draw.random() < 0.15 and len(self.asked) < 20:
            self.submit()
        if self.asked and draw.random() < 0.03:
            gone = self.asked if draw.random() < 0.3 else [draw.choice(self.asked)]
            for handle, _ in gone:
                handle.cancel()

    def check(self, *, may_fail: bool) -> None:
        for handle, expected in self.asked:
            assert handle.error is None or may_fail, handle.error
            tokens = list(handle.tokens)
            is_whole = handle.error is None and not handle.cancelled
            assert tokens == (expected if is_whole else expected[: len(tokens)]), handle


@pytest.mark.parametrize("fails", [0.0, 0.03])
@pytest.mark.parametrize("pages", POOLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_each_prompt_alone(policy, pages, fails, alone, weights, monkeypatch):
    """Requests come, end, are cancelled and give way; launches raise; no page is written that
    may be another's, and no memory for tokens is lost."""
    page, num_pages = POOLS[pages]
    draw = Random(f"{policy} {pages} {fails}")
    pool = pool_of(CONFIG, num_pages, page, reuse=draw.random() < 0.5)
    device = LateDevice(draw, fails=fails, fails_behind=draw.choice([0, 0.4]))
    executor = ModelExecutor(
        Decoder(CONFIG, weights), pool, device=device, max_running=4, max_prefill=2,
        max_tokens=40, max_context=CONTEXT,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        make_late(executor, device, patch)
        mux = Multiplexer(
            executor,
            policy=POLICIES[policy](draw),
            preemption=draw.choice(["keep", "recompute"]),
        )
        served = Served(mux, alone, draw)
        served.submit()
        for _ in range(60):
            served.change()
            mux.step()
            for _ in range(draw.choice([0, 1, 5])):
                device.some()
        for _ in range(STEPS):
            mux.step()
            mux.wait()
            if mux.is_idle:
                break
        assert mux.is_idle, f"not at its end after {STEPS} steps"
        served.check(may_fail=fails > 0)
        mux.close()
    pool.poll()
    pool.check()
    assert pool.usage.held == 0
    reads = executor._reads
    assert len(reads._free) % ROOMS == 0
