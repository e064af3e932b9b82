"""Lives of requests in which launches raise, the device errs or is lost, and policies misbehave."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from smkern.errors import SmkernError
from smkern.policies import Decision
from tests.runtime.policies import Sometimes
from tests.runtime.test_state_machine import POLICIES
from tests.runtime.world import World, live, prompts, random_world

pytestmark = pytest.mark.slow

LIVES = 25
FAULTS = {
    "a launch raises": ("raise",),
    "a launch fails on the device": ("error",),
    "either": ("raise", "error"),
    "the device is lost": ("lost", "raise"),
}


def life(seed: int, kinds: tuple[Any, ...]) -> World:
    """Arrivals, cancellations, pages that run out, and faults; to the end."""
    draw = Random(seed)
    faults: dict[int, Any] = {}

    def policy() -> Any:
        for _ in range(draw.choice([1, 2, 5])):
            at = draw.randint(0, 150)
            faults[at] = draw.choice(kinds)
        made = POLICIES[draw.choice(sorted(POLICIES))](seed)
        if draw.random() < 0.3:
            return Sometimes(made, lambda snapshot: Decision(rung=17), range(3, 200, 5))
        return made

    world, texts = random_world(policy, draw, seed, device={"faults": faults})
    world.may_fail = None

    def submit(at: int) -> None:
        world.submit(texts[at], draw.randint(1, 12), priority=draw.choice([0, 0, 1]), seed=at)

    live(world, draw, submit, len(texts), cancels=0.03)
    world.finish(most_steps=5000)
    return world


@pytest.mark.parametrize("kinds", FAULTS)
def test_what_fails_is_named_and_gives_all_back(kinds: str) -> None:
    """`World` finds pages that are lost, tokens that are wrong, and requests without an end."""
    failed = 0
    for seed in range(LIVES):
        world = life(seed, FAULTS[kinds])
        for handle in world.handles:
            failed += handle.error is not None
            assert handle.error is None or isinstance(handle.error, SmkernError)
    assert failed


@pytest.mark.parametrize("seed", [71, 109, 166])
def test_a_batch_that_fails_with_cancelled_requests(seed: int) -> None:
    life(seed, FAULTS["a launch raises"])


def test_a_batch_with_a_request_whose_chunk_before_fails() -> None:
    """The rest of the batch is not forgotten with it."""
    life(741, FAULTS["a launch fails on the device"])


@pytest.mark.parametrize("seed", range(8))
def test_closing_at_any_time_gives_everything_back(seed: int) -> None:
    draw = Random(seed)
    world = World(POLICIES[draw.choice(sorted(POLICIES))](seed), num_pages=40)
    for text in prompts(8, seed, longest=50):
        world.submit(text, 10)
        for _ in range(draw.randint(0, 12)):
            if not world.step():
                world.wait(draw.choice([3.0, 40.0]))
    world.close()
