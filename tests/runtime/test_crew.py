"""Those that decode step after step: their numbers are those of each of them."""

from __future__ import annotations

from random import Random

import pytest

from smkern.models import SamplingParams, preset
from smkern.models.request import Request
from smkern.policies import FixedSplit
from smkern.runtime import Multiplexer, SimExecutor
from smkern.runtime.books import Books
from smkern.runtime.crew import Crew
from smkern.runtime.live import Live
from smkern.runtime.sim.pool import SimPool
from tests.runtime.world import World

PAGE = 4


def books_of(lengths: list[int], most: int = 40, num_pages: int = 200) -> Books:
    """Requests of these lengths that run, with pages for them."""
    pool = SimExecutor(preset("qwen3-8b"), num_pages=num_pages, page_size=PAGE).pool
    assert isinstance(pool, SimPool)
    books = Books(pool, "recompute", False, 64, lambda live, begins_anew: None)
    for index, length in enumerate(lengths):
        params = SamplingParams(max_new_tokens=most - length)
        request = Request(index, params, 1, frozenset([2]), most - length, [7] * length, length)
        live = Live(request, 0, float(index), float("inf"))
        assert books.admit(live)
        books.run(live)
    return books


def crew_of(books: Books) -> Crew:
    left = [live.request.max_new_tokens for live in books.running]
    return Crew(books, books.running[:], tuple(live.request for live in books.running), left)


@pytest.mark.parametrize("seed", range(8))
def test_pages_are_those_that_each_would_get(seed: int):
    """Steps by a crew and by `reserve`, on books that are the same otherwise."""
    draw = Random(seed)
    lengths = [draw.randrange(1, 12) for _ in range(9)]
    ours, theirs = books_of(lengths), books_of(lengths)
    crew = crew_of(ours)
    for _ in range(12):
        steps = draw.choice([1, 1, 2, 3])
        assert crew.extend(ours, steps)
        assert theirs.reserve(steps) == steps
        crew.launched += steps
        for live in theirs.running:
            live.ahead += steps
        assert [live.room for live in ours.running] == [live.room for live in theirs.running]
        assert ours.free_pages == theirs.free_pages
        if draw.random() < 0.5:
            crew.count()
        assert crew.lengths == tuple(len(x.request.ids) + x.ahead for x in theirs.running)


def test_nothing_changes_where_pages_lack():
    books = books_of([4, 4, 4], num_pages=5)
    crew = crew_of(books)
    assert not crew.extend(books, 2)
    assert not crew.extend(books, 2)
    assert [live.room for live in books.running] == [4, 4, 4]
    assert books.free_pages == 2
    books.drop(books.running[-1])
    assert not crew.is_valid(books)
    assert crew_of(books).extend(books, 2)
    assert books.free_pages == 0


def test_who_may_end_is_looked_at():
    books = books_of([4, 6])
    crew = crew_of(books)
    assert crew.stays([7, 8], 1)
    assert not crew.stays([7, 2], 1)
    least = 40 - 6
    assert crew.least_left == least
    assert crew.stays([7, 8], least - 1)
    assert not crew.stays([7, 8], least)
    books.running[0].again = [5]
    assert not crew_of(books).stays([7, 8], 1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_most_steps_are_like_the_one_before(steps: int):
    """Tokens come once, in order, at the step in which they were seen."""
    world = World(FixedSplit(48, steps=steps), end_probability=0.0, num_pages=400)
    launches = world.mux._launches
    for index in range(4):
        world.submit([index] * 5, 40)
    slow = []
    plain = launches._decoding
    launches._decoding = lambda: slow.append(world.steps) or plain()  # type: ignore[func-returns-value]
    world.finish()
    assert len(slow) < 20
    assert all(len(handle.tokens) == 40 for handle in world.handles)


def test_cancelled_between_two_steps():
    mux = Multiplexer(SimExecutor(preset("qwen3-8b"), num_pages=400), policy=FixedSplit(48))
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    handles = [mux.submit([index] * 5, params) for index in range(3)]
    for count, output in enumerate(mux.run()):
        assert output.token in handles[output.id].tokens
        if count == 60:
            handles[1].cancel()
            known = len(handles[1].tokens)
    assert len(handles[1].tokens) == known
    assert [len(handles[i].tokens) for i in (0, 2)] == [50, 50]
