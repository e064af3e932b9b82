"""Scheduling over a pool whose memory remembers tokens: every forward finds its own before it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.errors import OutOfPagesError
from smkern.kv import KvPool, KvSizes
from smkern.models import SamplingParams
from smkern.models.request import Request
from smkern.models.scheduler import Scheduler, Work

SIZE = 16


def new_request(index: int, ids: list[int], max_new_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens)
    return Request(index, params, 0, frozenset({7}), max_new_tokens, list(ids), len(ids))


def next_token(ids: list[int]) -> int:
    """What the model says: a number that all tokens decide."""
    return hash(tuple(ids)) % 8


def alone(ids: list[int], max_new_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and 7 not in tokens:
        tokens.append(next_token(ids + tokens))
    return tokens


class Memory:
    """Pages as a model reads and writes them: a token at each slot."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, work: Work) -> None:
        """Write all chunks, then read what each sees; draws tokens as the engine does."""
        for chunk in work.chunks:
            pages = self.pool.pages(chunk.request)
            for at in range(chunk.start, chunk.start + chunk.count):
                self.slots[pages[at // SIZE], at % SIZE] = chunk.request.ids[at]
        drawn = []
        for chunk in work.chunks:
            pages = self.pool.pages(chunk.request)
            end = chunk.start + chunk.count
            seen = [self.slots[pages[at // SIZE], at % SIZE] for at in range(end)]
            assert seen == chunk.request.ids[:end]
            drawn.append(next_token(seen) if chunk.draws else None)
        self.drawn = drawn


def serve(
    scheduler: Scheduler, memory: Memory, max_batch: int, max_step_tokens: int
) -> tuple[int, int]:
    """Run until idle; returns how many forwards it took, and how many were decode steps."""
    forwards = decodes = 0
    while not scheduler.is_idle:
        work = scheduler.next()
        assert 0 < len(work.chunks) <= max_batch
        assert sum(chunk.count for chunk in work.chunks) <= max(max_step_tokens, max_batch)
        memory.run(work)
        scheduler.done(work)
        for chunk, token in zip(work.chunks, memory.drawn, strict=True):
            if token is not None:
                chunk.request.accept(token)
        scheduler.drop_finished()
        memory.pool.check()
        forwards += 1
        decodes += work.decodes
        assert forwards < 5000
    return forwards, decodes


# Prompts of few beginnings, so that they share blocks.
PROMPTS = st.tuples(st.integers(0, 1), st.integers(1, 50), st.integers(0, 3)).map(
    lambda given: [given[0]] * given[1] + [given[2]] * (given[1] % 5)
)


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPTS, st.integers(1, 40)), min_size=1, max_size=8),
    num_pages=st.integers(6, 14),
    max_batch=st.integers(1, 5),
    max_step_tokens=st.integers(1, 70),
    reuse=st.booleans(),
)
def test_each_request_gets_what_it_gets_alone(
    requests: list[tuple[list[int], int]],
    num_pages: int,
    max_batch: int,
    max_step_tokens: int,
    reuse: bool,
) -> None:
    pool = KvPool(KvSizes(1, 1, 64), num_pages=num_pages, device="cpu", reuse=reuse)
    scheduler = Scheduler(pool, max_batch, max_step_tokens)
    made = [new_request(i, *given) for i, given in enumerate(requests)]
    for request in made:
        scheduler.add(request)
    serve(scheduler, Memory(pool), max_batch, max_step_tokens)
    for request, (ids, count) in zip(made, requests, strict=True):
        assert request.ids[len(ids) :] == alone(ids, count)
        assert request.finish_reason is not None
        assert request.cached_tokens is not None
    assert pool.requests == ()
    assert pool.usage.held == 0


def test_the_youngest_makes_room_and_comes_back() -> None:
    pool = KvPool(KvSizes(1, 1, 64), num_pages=4, device="cpu")
    scheduler, memory = Scheduler(pool, 2, 64), Memory(pool)
    old, young = new_request(0, [1] * 30, 20), new_request(1, [2] * 20, 10)
    for request in (old, young):
        request.stop_token_ids = frozenset()
        scheduler.add(request)
    preempted = False
    while not scheduler.is_idle:
        work = scheduler.next()
        preempted |= list(scheduler.running) == [old] and young.finish_reason is None
        memory.run(work)
        scheduler.done(work)
        for chunk, token in zip(work.chunks, memory.drawn, strict=True):
            if token is not None:
                chunk.request.accept(token)
        scheduler.drop_finished()
    assert preempted
    assert (len(old.ids), len(young.ids)) == (50, 30)


def test_a_request_that_waits_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are asked for again only when some have come back."""
    pool = KvPool(KvSizes(1, 1, 64), num_pages=4, device="cpu")
    scheduler, memory, asked = Scheduler(pool, 2, 64), Memory(pool), 0
    allocate = KvPool.allocate

    def counting(*args: object, **options: object) -> int:
        nonlocal asked
        asked += 1
        return allocate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(KvPool, "allocate", counting)
    for request in (new_request(0, [1] * 40, 20), new_request(1, [2] * 40, 20)):
        request.stop_token_ids = frozenset()
        scheduler.add(request)
    serve(scheduler, memory, 2, 64)
    assert asked == 3


def test_pages_of_somebody_else_are_an_error() -> None:
    pool = KvPool(KvSizes(1, 1, 64), num_pages=3, device="cpu")
    pool.allocate("foreign", [1] * 33)
    scheduler = Scheduler(pool, 2, 64)
    scheduler.add(new_request(0, [1], 1))
    with pytest.raises(OutOfPagesError, match="prompt 0 needs 1 more pages"):
        scheduler.next()
    scheduler.abort(None)
    assert pool.requests == ("foreign",)
