"""A policy that does anything it may, raises or answers nonsense costs nobody a token."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from smkern.policies import Chunked, Decision, Snapshot
from tests.policies.test_check import BAD_FIELDS
from tests.runtime.policies import RandomPolicy, Sometimes
from tests.runtime.world import World, live, prompts, random_world

pytestmark = pytest.mark.slow

FREE: dict[str, Any] = {
    "sides of their own": lambda seed: RandomPolicy(seed, free=0.5),
    "asked again": lambda seed: RandomPolicy(seed, again=0.7, idle=0.4),
    "both, restless": lambda seed: RandomPolicy(
        seed, free=0.7, again=0.4, idle=0.4, preempt=0.8, stay=0.1
    ),
}
"""Random policies over all that a decision can say."""


def life(policy: Any, seed: int) -> World:
    """Arrivals, cancellations and pages that run out, from first to last."""
    draw = Random(seed)
    world, texts = random_world(lambda: policy, draw, seed)

    def submit(at: int) -> None:
        deadline_ms = draw.choice([None, 0.1, 5.0])
        priority, most = draw.choice([0, 0, 1]), draw.randint(1, 12)
        world.submit(texts[at], most, priority=priority, deadline_ms=deadline_ms, seed=at)

    live(world, draw, submit, len(texts))
    world.finish(wait_us=500.0)
    return world


@pytest.mark.parametrize("policy", FREE)
@pytest.mark.parametrize("seed", range(16))
def test_whatever_a_decision_may_say(policy: str, seed: int) -> None:
    """Nothing overlaps that may not, nobody starves, no token is lost or wrong."""
    world = life(FREE[policy](seed), seed)
    served = [end for end in world.ended.values() if end != "cancelled"]
    assert len(served) > len(world.handles) // 2
    for _, error in world.mux.errors:  # it counts rows without those that join
        assert "launched nothing" in str(error) or "decode rows are left" in str(error)


@pytest.mark.parametrize("policy", FREE)
def test_whatever_it_says_while_launches_fail(policy: str) -> None:
    failed = 0
    for seed in range(12):
        draw = Random(seed)
        faults = {draw.randint(0, 80): draw.choice(["raise", "error"]) for _ in range(3)}
        world = _failing(FREE[policy](seed), seed, faults)
        failed += sum(end == "failed" for end in world.ended.values())
    assert failed


def _failing(policy: Any, seed: int, faults: dict[int, Any]) -> World:
    world = World(policy, num_pages=40, device={"faults": faults})
    world.may_fail = None
    for at, text in enumerate(prompts(10, seed, longest=40)):
        world.submit(text, 1 + at)
        for _ in range(4):
            world.turn(20.0)
    world.finish(wait_us=500.0)
    return world


NONSENSE = [
    replace(Decision(), **{field: value})
    for field, values in BAD_FIELDS.items()
    for value in values
]


@pytest.mark.parametrize("seed", range(6))
def test_nonsense_in_any_field(seed: int) -> None:
    """At every other turn; whoever is served alike gets the same tokens."""
    draw = Random(seed)

    def spoil(snapshot: Snapshot) -> Any:
        if draw.random() < 0.3:
            raise ValueError("a policy's own mistake")
        return draw.choice([None, 3, "decode", *NONSENSE])

    policy: Any = draw.choice([Chunked(16), *(make(seed) for make in FREE.values())])
    world = life(Sometimes(policy, spoil, range(0, 5000, 2)), seed)
    assert len(world.mux.errors) > 8
    assert all(error for _, error in world.mux.errors)


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_nothing_but_nonsense(field: str) -> None:
    """What is carried out instead serves everybody."""
    values = BAD_FIELDS[field]
    turn = iter(range(10**6))

    def spoil(snapshot: Snapshot) -> Any:
        return replace(Decision(), **{field: values[next(turn) % len(values)]})

    world = World(Sometimes(Chunked(), spoil, range(10**6)), num_pages=30)
    for at, text in enumerate(prompts(6, 1, longest=40)):
        world.submit(text, 3 + at)
    world.finish(wait_us=100.0)
    assert world.mux.errors
    assert all(str(error).startswith(f"{field}=") for _, error in world.mux.errors)
