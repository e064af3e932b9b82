"""The Multiplexer on a simulated GPU: what must hold after every step, whatever happens."""

from __future__ import annotations

from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smkern.errors import OutOfPagesError, RequestError
from smkern.policies import Chunked, StaticSplit
from tests.runtime.policies import RandomPolicy
from tests.runtime.world import Linear, World, live, prompts, random_world

pytestmark = pytest.mark.slow

POLICIES: dict[str, Any] = {
    "random": RandomPolicy,
    "restless": lambda seed: RandomPolicy(seed, idle=0.5, preempt=0.8, stay=0.1),
    "chunks": lambda seed: Chunked(chunk_tokens=16),
    "chunks under a limit": lambda seed: Chunked(tbt_slo_ms=0.5, predictor=Linear()),
    "a split": lambda seed: StaticSplit(48, layers=2, max_prefill_tokens=32),
    "a split that stays": lambda seed: StaticSplit(96, layers=3, move=False, steps=5),
    "a split with preemption": lambda seed: StaticSplit(
        16, layers=1, preempt_shorter_than=10, max_prefill_tokens=20
    ),
    "gangs": lambda seed: StaticSplit(48, layers=2, steps=3, join="gang", preempt_shorter_than=8),
}
SETTINGS = st.fixed_dictionaries(
    {
        "preemption": st.sampled_from(["recompute", "keep"]),
        "batch_invariant": st.booleans(),
        "impatient": st.booleans(),
        "num_pages": st.sampled_from([18, 30, 100]),
        "page_size": st.sampled_from([4, 16]),
        "max_running": st.sampled_from([1, 3, 8]),
        "max_prefill": st.sampled_from([1, 4]),
        "max_tokens": st.sampled_from([24, 64]),
        "end_probability": st.sampled_from([0.0, 0.1]),
    }
)


class MultiplexerMachine(RuleBasedStateMachine):
    """Requests come, are cancelled, and time goes by, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 99), given=SETTINGS)
    def begin(self, policy: str, seed: int, given: dict[str, Any]) -> None:
        self.world = World(POLICIES[policy](seed), **given)
        self.texts = prompts(60, seed, longest=50)

    @rule(
        text=st.integers(0, 59),
        new=st.integers(1, 14),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        later_us=st.sampled_from([None, None, 0.0, 50.0, 2000.0]),
        stop=st.integers(0, 49),
    )
    def submit(self, text: int, new: int, priority: int, later_us: float | None, stop: int) -> None:
        world = self._world()
        now_us = world.device.now_us()
        try:
            world.submit(
                self.texts[text],
                new,
                priority=priority,
                arrival_us=None if later_us is None else now_us + later_us,
                stop_token_ids=(stop,),
            )
        except OutOfPagesError:
            held = world.executor.pool.num_pages * world.executor.pool.page_size
            assert len(self.texts[text]) + new - 1 > held
        except RequestError:
            assert len(self.texts[text]) > world.executor.max_context

    @precondition(lambda self: self.world is not None and self.world.handles)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        world = self._world()
        world.cancel(data.draw(st.integers(0, len(world.handles) - 1)))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._world().step()

    @rule(us=st.sampled_from([1.0, 10.0, 60.0, 400.0, 5000.0]))
    def wait(self, us: float) -> None:
        self._world().wait(us)

    @rule()
    def finish(self) -> None:
        self._world().finish()

    @invariant()
    def all_holds(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        """Nobody starves, nothing is left."""
        if self.world is not None:
            self.world.finish()
            self.world.mux.close()
            self.world.check_end()

    def _world(self) -> World:
        assert self.world is not None
        return self.world


MultiplexerMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestMultiplexer = MultiplexerMachine.TestCase


MENDED = (10, 316, 548, 96, 512)
"""Lives that went wrong once."""


@pytest.mark.parametrize("seed", [*range(30), *(seed for seed in MENDED if seed >= 30)])
def test_random_lives(seed: int) -> None:
    """Arrivals, cancellations and pages that run out, from first to last, by every policy."""
    draw = Random(seed)
    world, texts = random_world(lambda: POLICIES[draw.choice(sorted(POLICIES))](seed), draw, seed)

    def submit(at: int) -> None:
        world.submit(texts[at], draw.randint(1, 12), priority=draw.choice([0, 0, 1]), seed=at)

    live(world, draw, submit, len(texts))
    world.finish()
    assert sum(end != "cancelled" for end in world.ended.values()) > len(texts) // 2


@pytest.mark.parametrize("preemption", ["recompute", "keep"])
@pytest.mark.parametrize("policy", POLICIES)
def test_long_answers_on_few_pages(policy: str, preemption: Any) -> None:
    """Who gives way comes back, again and again; some ends are early, some are cancelled."""
    preemptions = 0
    for seed in range(3):
        draw = Random(f"{policy} {seed}")
        world = World(
            POLICIES[policy](seed),
            preemption=preemption,
            batch_invariant=draw.random() < 0.3,
            num_pages=draw.choice([12, 20, 30]),
            page_size=4,
            max_running=8,
            end_probability=0.02,
        )
        for text in prompts(12, seed, longest=10):
            world.submit(text, draw.randint(5, 36))
            for _ in range(draw.choice([0, 1, 5])):
                if not world.step() and draw.random() < 0.5:
                    world.wait(draw.choice([1, 15, 60]))
        while not world.mux.is_idle and world.steps < 5000:
            if not world.step():
                world.wait(draw.choice([1, 15, 60]))
            if draw.random() < 0.01:
                world.cancel(draw.choice(world.handles).id)
        world.finish()
        preemptions += world.mux.stats().preemptions
    assert preemptions
