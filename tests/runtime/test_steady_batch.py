"""Those that decode step after step: their numbers are those of each of them."""

from __future__ import annotations

from random import Random

import pytest

from smkern.kv import PagePool
from smkern.models import SamplingParams, preset
from smkern.policies import StaticSplit
from smkern.runtime import Multiplexer, SimExecutor
from smkern.runtime.queues import Preemption, RequestQueues
from smkern.runtime.request import Request
from smkern.runtime.steady_batch import SteadyBatch
from tests.runtime.world import World

PAGE = 4


def a_request(index: int, length: int, most: int = 40) -> Request:
    params, prompt = SamplingParams(max_new_tokens=most - length), [7] * length
    return Request(
        index, params, 1, frozenset([2]), most - length, prompt, length, arrival_us=float(index)
    )


def queues_of(
    lengths: list[int], num_pages: int = 200, preemption: Preemption = "recompute"
) -> RequestQueues:
    """Requests of these lengths that run, with pages for them."""
    pool = PagePool(num_pages, PAGE)
    queues = RequestQueues(pool, preemption, False, 64, lambda request, begins_anew: None)
    for index, length in enumerate(lengths):
        request = a_request(index, length)
        assert queues.admit(request)
        queues.run(request)
    return queues


def steady_of(queues: RequestQueues) -> SteadyBatch:
    left = [request.max_new_tokens for request in queues.running]
    return SteadyBatch(queues, tuple(queues.running), left)


@pytest.mark.parametrize("seed", range(8))
def test_pages_are_those_that_each_would_get(seed: int):
    """Steps by a steady batch and by `reserve`, on queues that are the same otherwise."""
    draw = Random(seed)
    lengths = [draw.randrange(1, 12) for _ in range(9)]
    ours, theirs = queues_of(lengths), queues_of(lengths)
    steady = steady_of(ours)
    for _ in range(12):
        steps = draw.choice([1, 1, 2, 3])
        assert steady.extend(ours, steps)
        assert theirs.reserve(steps) == steps
        for _ in range(steps):
            steady.advance()
        for request in theirs.running:
            request.num_pending += steps
        assert [x.room for x in ours.running] == [x.room for x in theirs.running]
        assert ours.pool.usage == theirs.pool.usage
        if draw.random() < 0.5:
            steady.count()
        assert steady.lengths == tuple(x.num_tokens for x in theirs.running)
        assert steady.longest == max(steady.lengths)


def test_nothing_changes_where_pages_lack():
    queues = queues_of([4, 4, 4], num_pages=5)
    steady = steady_of(queues)
    assert not steady.extend(queues, 2)
    assert not steady.extend(queues, 2)
    assert [x.room for x in queues.running] == [4, 4, 4]
    assert queues.pool.num_available == 2
    queues.drop(queues.running[-1])
    assert not steady.is_valid(queues)
    assert steady_of(queues).extend(queues, 2)
    assert queues.pool.num_available == 0


def test_who_may_end_is_looked_at():
    queues = queues_of([4, 6])
    steady = steady_of(queues)
    assert steady.stays([7, 8], 1)
    assert not steady.stays([7, 2], 1)
    least = 40 - 6
    assert steady.least_left == least
    assert steady.stays([7, 8], least - 1)
    assert not steady.stays([7, 8], least)
    queues.running[0].to_repeat = [5]
    assert not steady_of(queues).stays([7, 8], 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_most_steps_are_like_the_one_before(steps: int, monkeypatch: pytest.MonkeyPatch):
    """Tokens come once, in order, at the step in which they were seen."""
    world = World(StaticSplit(48, steps=steps), end_probability=0.0, num_pages=400)
    for index in range(4):
        world.submit([index] * 5, 40)
    slow, reserve = [], RequestQueues.reserve

    def looking(queues: RequestQueues, steps: int) -> int:
        slow.append(world.steps)
        return reserve(queues, steps)

    monkeypatch.setattr(RequestQueues, "reserve", looking)
    world.finish()
    assert len(slow) < 20
    assert all(len(handle.tokens) == 40 for handle in world.handles)


def test_cancelled_between_two_steps():
    mux = Multiplexer(SimExecutor(preset("qwen3-8b"), num_pages=400), policy=StaticSplit(48))
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    handles = [mux.submit([index] * 5, params) for index in range(3)]
    for count, output in enumerate(mux.run()):
        assert output.token in handles[output.id].tokens
        if count == 60:
            handles[1].cancel()
            known = len(handles[1].tokens)
    assert len(handles[1].tokens) == known
    assert [len(handles[i].tokens) for i in (0, 2)] == [50, 50]
