"""A request of higher priority takes the row and the pages of one that runs."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from smkern.policies import Chunked, Decision, Snapshot, StaticSplit
from smkern.runtime.handle import Handle
from tests.runtime.policies import RandomPolicy, Scripted
from tests.runtime.world import World, prompts

POLICIES: dict[str, Any] = {
    "chunks": lambda: Chunked(chunk_tokens=32),
    "a split": lambda: StaticSplit(48, layers=1),
}
each_policy = pytest.mark.parametrize("policy", POLICIES)
FULL: dict[str, dict[str, Any]] = {
    "rows": {"max_running": 4, "num_pages": 200},
    "pages": {"max_running": 8, "num_pages": 24},
    "rows, decode pauses": {"max_running": 4, "num_pages": 200, "preemption": "keep"},
    "pages, decode pauses": {"max_running": 8, "num_pages": 24, "preemption": "keep"},
    "bit by bit": {"max_running": 4, "num_pages": 200, "batch_invariant": True},
}


def full(policy: Any, reuse: bool | None = False, **options: Any) -> World:
    """Four requests of long answers decode, and nothing more fits."""
    world = World(policy, page_size=4, end_probability=0.0, reuse=reuse, **options)
    for index in range(4):
        world.submit([index] * 12, 70, seed=index)
        world.wait(1.0)
    world.until(lambda: len(world.mux._queues.running) == 4, 1.0)
    return world


def first_token_us(world: World, handle: Handle) -> float:
    """From now to its first token."""
    now_us = world.device.now_us()
    world.until(lambda: world.tokens[handle.id], 1.0)
    return world.device.now_us() - now_us


@pytest.mark.parametrize("lack", FULL)
@each_policy
def test_a_high_priority_waits_for_one_step(policy: str, lack: str) -> None:
    world = full(POLICIES[policy](), **FULL[lack])
    step_us = 1.25 * (5.0 + (4 * 4.0 + 0.02 * 4 * 40) * 132 / 48)
    pages = world.executor.pool.num_available
    prompt = [9] * (20 if pages > 20 else 4 * pages)
    alone = World(POLICIES[policy](), end_probability=0.0)
    alone_us = first_token_us(alone, alone.submit(prompt, 4))
    high = world.submit(prompt, 4, priority=9)
    waited_us = first_token_us(world, high)
    # The steps on their way, and its own prompt beside the others'.
    assert waited_us < 2 * step_us + 2 * alone_us
    assert world.mux.stats().preemptions >= 1
    assert not any(handle.done for handle in world.handles)
    world.finish()
    assert not world.mux.errors


@each_policy
def test_nobody_yields_to_his_own_priority_or_a_lower_one(policy: str) -> None:
    world = full(POLICIES[policy](), **FULL["rows"])
    world.submit([9] * 20, 4)
    world.submit([8] * 20, 4, priority=-3)
    world.finish()
    assert world.mux.stats().preemptions == 0


@each_policy
def test_nobody_yields_in_vain(policy: str) -> None:
    """One whose prompt needs more than the lower priorities hold."""
    world = World(POLICIES[policy](), page_size=4, num_pages=40, end_probability=0.0, reuse=False)
    world.submit([1] * 100, 30, priority=9)
    world.submit([2] * 8, 40)
    world.until(lambda: len(world.mux._queues.running) == 2, 1.0)
    world.submit([3] * 80, 3, priority=9)
    for _ in range(10):
        world.turn(1.0)
    assert world.mux.stats().preemptions == 0
    world.finish()


Text = tuple[int, int, int]
"""Tokens of a common text, tokens of its own, and a priority."""


def sharing(num_pages: int, *texts: Text) -> World:
    """Requests that decode, 60 tokens each."""
    world = World(page_size=4, num_pages=num_pages, end_probability=0.0)
    for number, text in enumerate(texts):
        submit(world, text)
        world.until(lambda number=number: world.tokens[number], 1.0)  # type: ignore[misc]
    return world


def submit(world: World, text: Text, max_new_tokens: int = 60) -> Handle:
    common, own, priority = text
    prompt = [1] * common + [20 + len(world.handles)] * own
    return world.submit(prompt, max_new_tokens, priority=priority)


def test_nobody_yields_for_pages_that_are_shared() -> None:
    """The first prompt shares all its pages but one with an equal."""
    world = sharing(36, (40, 2, 1), (0, 60, 0))
    high = submit(world, (40, 2, 1), 4)
    first_token_us(world, high)
    assert world.mux.stats().preemptions == 0
    world.finish()


@pytest.mark.parametrize(
    ("first", "last", "high"),
    [
        pytest.param((80, 2, 1), (80, 2, 0), (0, 88, 1), id="with an equal"),
        pytest.param((0, 40, 1), (80, 2, 0), (80, 60, 1), id="with the one who wants them"),
    ],
)
def test_nobody_yields_who_shares_his_pages(first: Text, last: Text, high: Text) -> None:
    """But one or two of his pages are another's too, and would not come back."""
    world = sharing(41, first, last)
    submit(world, high, 4)
    world.until(lambda: len(world.tokens[0]) == 20, 1.0)
    assert world.mux.stats().preemptions == 0
    world.finish()


def test_two_who_share_their_pages_yield_them_together() -> None:
    world = sharing(40, (80, 2, 0), (80, 2, 0))
    first_token_us(world, submit(world, (0, 88, 1), 4))
    assert world.mux.stats().preemptions == 2
    assert not any(handle.done for handle in world.handles[:2])
    world.finish()


def test_a_policy_sees_the_row_and_decides() -> None:
    """The rows are free when it is asked; it may leave them so."""
    rows: list[int] = []

    def decide(snapshot: Snapshot) -> Decision:
        if any(request.priority for request in snapshot.waiting):
            rows.append(snapshot.max_running - snapshot.batch)
            return Decision()
        room = snapshot.max_running - snapshot.batch
        return Decision(prefill=tuple(x.id for x in snapshot.waiting[: min(room, 4)]))

    world = full(Scripted([], decide), **FULL["rows"])
    high = world.submit([9] * 20, 4, priority=1)
    for _ in range(40):
        world.turn(10.0)
    assert rows[:3] == [1, 1, 1]
    assert world.mux.stats().preemptions == 1
    world.cancel(high.id)
    world.finish()


def test_a_short_prompt_of_high_priority_may_go_before_a_batch() -> None:
    """A row is there for a policy that preempts, and none is taken for one of equal priority."""
    policy = StaticSplit(48, layers=1, preempt_shorter_than=30)
    world = full(policy, max_running=5, num_pages=200)
    long = world.submit([7] * 45, 4)
    world.until(lambda: long._request.stage == "prefill", 1.0)
    same = world.submit([8] * 4, 4)
    for _ in range(3):
        world.turn(1.0)
    assert world.mux.stats().preemptions == 0
    high = world.submit([9] * 4, 4, priority=3)
    world.until(lambda: world.tokens[high.id], 1.0)
    assert not world.tokens[long.id]
    assert not world.tokens[same.id]
    assert world.mux.stats().preemptions == 1
    world.finish()


@pytest.mark.parametrize("seed", range(24))
def test_priorities_at_random(seed: int) -> None:
    """Whoever gives way, tokens are those of each alone, and everybody ends."""
    draw = Random(seed)
    policy = draw.choice(
        [*(make() for make in POLICIES.values()), RandomPolicy(seed), RandomPolicy(seed, free=0.5)]
    )
    world = World(
        policy,
        preemption=draw.choice(["recompute", "keep"]),
        batch_invariant=draw.random() < 0.3,
        max_running=draw.choice([1, 2, 4]),
        num_pages=draw.choice([24, 40, 100]),
        page_size=4,
    )
    for at, text in enumerate(prompts(16, seed, longest=40)):
        world.submit(text, draw.randint(1, 30), priority=draw.choice([0, 0, 1, 2, 5]), seed=at)
        for _ in range(draw.choice([0, 2, 8])):
            world.step() or world.wait(draw.choice([3, 40]))  # type: ignore[func-returns-value]
        if draw.random() < 0.1:
            world.cancel(draw.choice(world.handles).id)
    world.finish(wait_us=100.0)


def test_high_priorities_are_served_in_their_order() -> None:
    """Several at once: each takes a row, and the lowest of those that run goes first."""
    world = full(Chunked(chunk_tokens=48), **FULL["rows"])
    priorities = [3, 9, 5, 9]
    handles = [world.submit([20 + i] * 6, 3, priority=p) for i, p in enumerate(priorities)]
    world.finish()
    firsts: dict[int, float] = {}
    for at_us, output in world.outputs:
        firsts.setdefault(output.id, at_us)
    order = sorted(range(4), key=lambda i: (-priorities[i], i))
    times = [firsts[handles[i].id] for i in order]
    assert all(early <= late for early, late in pairwise(times))
