"""In which order requests wait, and what a policy sees of a long queue."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest

from smkern.errors import ArgumentError, SmkernError
from smkern.kv import PagePool
from smkern.policies import ORDERS, Order, Waiting
from smkern.replay import Arrival, Trace
from smkern.replay.limits import ttft_limits_s
from smkern.runtime import waiting_queue
from smkern.runtime.request import Request
from smkern.runtime.waiting_queue import SEEN, WaitingQueue
from tests.runtime.policies import Scripted
from tests.runtime.test_steady_batch import a_request, queues_of
from tests.runtime.world import World

PAGE = 4


def a_queue(
    order: Order = ORDERS["fcfs"], num_pages: int = 64
) -> tuple[WaitingQueue, PagePool, list[SmkernError]]:
    errors: list[SmkernError] = []
    pool = PagePool(num_pages, PAGE)
    return WaitingQueue(pool, order, errors.append), pool, errors


def names(queue: WaitingQueue) -> list[int]:
    return [request.index for request in queue.requests]


def seen(queue: WaitingQueue) -> list[int]:
    return [view.id for view in queue.views()]


def request_of(index: int, length: int = 8, **changes: Any) -> Request:
    request = a_request(index, length)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", [3, 0, 1, 2]),
        ("deadline", [3, 1, 2, 0]),  # one without a deadline is given 1 s
        ("shortest", [3, 2, 0, 1]),  # arrival + 200 us a token
        ("slack", [3, 1, 2, 0]),
    ],
)
def test_orders_by_hand(order: str, expected: list[int]) -> None:
    queue, _, _ = a_queue(ORDERS[order])
    queue.add(request_of(0, 30))
    queue.add(request_of(1, 39, deadline_us=4000.0))
    queue.add(request_of(2, 20, deadline_us=8000.0))
    queue.add(request_of(3, 39, priority=1, deadline_us=1e9))
    assert names(queue) == seen(queue) == expected


@pytest.mark.parametrize("deadline", [False, True])
def test_by_slack_short_prompts_pass_a_long_one_that_can_wait(deadline: bool) -> None:
    """Without deadlines as with those that replays give requests."""
    arrivals = (Arrival(0.0, 8000, 1), Arrival(1e-3, 900, 1), Arrival(2e-3, 2000, 1))
    limits_s = ttft_limits_s(Trace("t", arrivals), 0)
    assert limits_s == [8.0, 1.0, 2.0]
    keys = [
        ORDERS["slack"](
            Waiting(
                0, 1e6 * x.at_s, x.prompt_tokens,
                deadline_us=1e6 * (x.at_s + limit_s) if deadline else inf,
            )
        )
        for x, limit_s in zip(arrivals, limits_s, strict=True)
    ]  # fmt: skip
    assert keys == pytest.approx([8e6 - 160e3, 1.001e6 - 18e3, 2.002e6 - 40e3])


def test_a_request_whose_view_changes_is_placed_anew() -> None:
    queue, _, _ = a_queue(ORDERS["shortest"])
    for index, length in enumerate((20, 24, 28)):
        queue.add(request_of(index, length))
    last = queue.requests[-1]
    assert names(queue) == [0, 1, 2]
    last.room, last.num_computed = 28, 22
    queue.look_again(last)
    assert names(queue) == seen(queue) == [2, 0, 1]
    assert queue.views()[0] == Waiting(2, 2.0, 6, 22)
    last.room = last.num_computed = 0
    queue.look_again(last)
    assert seen(queue) == [0, 1, 2]


@pytest.mark.parametrize("order", ORDERS)
def test_a_long_queue_is_the_sorted_one(order: str) -> None:
    """Requests come, go and change at any place; the first `SEEN` are shown."""
    draw = Random(order)
    queue, pool, errors = a_queue(ORDERS[order])
    there: list[Request] = []
    for index in range(3 * SEEN):
        request = request_of(
            index,
            draw.randint(1, 39),
            priority=draw.choice((0, 0, 0, 1)),
            deadline_us=draw.choice((1e4, 2e4, float("inf"))),
        )
        queue.add(request)
        there.append(request)
        if draw.random() < 0.3:
            queue.remove(there.pop(draw.randrange(len(there))))
        if draw.random() < 0.3:
            other = draw.choice(there)
            other.room, other.num_computed = 40, draw.randrange(len(other.ids))
            queue.look_again(other)
        if index % 64:
            continue

        def key(request: Request) -> tuple[float, ...]:
            view = request.view(pool.pages_for)
            return (-view.priority, ORDERS[order](view), view.arrival_us, view.id)

        assert queue.requests == sorted(there, key=key)
        assert list(queue.views()) == [x.view(pool.pages_for) for x in queue.requests[:SEEN]]
    assert len(there) > SEEN
    while there:
        queue.remove(there.pop())
    assert (queue.requests, queue.views(), errors) == ([], (), [])


def known(pool: PagePool, tokens: list[int]) -> None:
    """Somebody has computed these tokens."""
    pool.allocate("before", tokens)
    pool.commit("before", tokens)
    pool.release("before")


def test_what_the_pool_holds_of_a_prompt_is_expected() -> None:
    queue, pool, _ = a_queue(ORDERS["shortest"])
    known(pool, [7] * 16)
    queue.add(request_of(0, 18))
    queue.add(request_of(1, 30))
    queue.add(request_of(2, 24, ids=[9] * 24))
    assert names(queue) == [0, 2, 1]
    assert [(view.id, view.tokens, view.cached) for view in queue.views()] == [
        (0, 2, 16),
        (1, 14, 16),
        (2, 24, 0),
    ]
    assert names(queue) == [0, 1, 2]


def test_only_the_first_are_looked_up() -> None:
    """Each once, when it comes among them: the names of a prompt's blocks are hashed then."""
    queue, pool, _ = a_queue()
    asked: list[int] = []
    plain = pool.match_prefix
    pool.match_prefix = lambda tokens: asked.append(1) or plain(tokens)  # type: ignore
    for index in range(SEEN + 40):
        queue.add(request_of(index))
    for _ in range(3):
        queue.views()
    assert len(asked) == SEEN
    assert queue.requests[SEEN].chain is None
    for request in queue.requests[:30]:
        queue.remove(request)
    assert len(queue.views()) == SEEN
    assert len(asked) == SEEN + 30


def test_known_prefixes_of_many_are_looked_up_over_several_steps(monkeypatch: Any) -> None:
    """The first to come first: a step's host time must not grow with how many come at once."""
    monkeypatch.setattr(waiting_queue, "FOUND", 40)
    queue, pool, _ = a_queue()
    known(pool, [7] * 16)
    for index in range(8):
        queue.add(request_of(index, 18))
    for count in (3, 6, 8):
        assert [view.cached for view in queue.views()] == [16] * count + [0] * (8 - count)


def test_pages_that_others_hold_are_not_counted() -> None:
    queue, pool, _ = a_queue()
    known(pool, [7] * 16)
    pool.allocate("holds", [7] * 9)
    queue.add(request_of(0, 18))
    queue.add(request_of(1, 18, ids=[9] * 18))
    assert [(view.cached, view.pages) for view in queue.views()] == [(16, 3), (0, 5)]
    first = queue.requests[0]
    pool.allocate("holds more", [7] * 18)
    queue.look_up_again(first)
    assert [view.pages for view in queue.views()] == [1, 5]
    pool.release("holds")
    pool.release("holds more")
    queue.look_up_again(first)
    assert [(view.cached, view.pages) for view in queue.views()] == [(16, 5), (0, 5)]


def test_pages_that_are_short_and_shared_are_looked_up_again() -> None:
    """Only those of the first, and only where it would lack pages without sharing them."""
    queues = queues_of([], num_pages=16)
    pool, text = queues.pool, [7] * 40
    first = request_of(0, 41, ids=[*text, 1])
    queues.wait(first)
    assert [view.pages for view in queues.views()] == [11]
    pool.allocate("a", text)
    pool.commit("a", text)
    assert [(view.cached, view.pages) for view in queues.views()] == [(40, 1)]
    assert queues.admit(first)
    assert pool.num_available == 16 - 10 - 1
    pool.check()


@pytest.mark.parametrize("pages", [26, 100])
def test_requests_with_a_common_prefix_run_at_a_time(pages: int) -> None:
    """One of 20 pages and two more each: fewer are there than for two prompts that share none."""
    world = World(num_pages=pages, page_size=4, max_running=6, end_probability=0.0)
    document = [1 + at % 40 for at in range(80)]
    world.submit([*document, 1], 1)
    world.finish()
    for number in range(3):
        world.submit([*document, number, number], 6)
    most = 0
    while not world.mux.is_idle:
        world.turn(5.0)
        most = max(most, len(world.mux._queues.running))
    world.finish()
    assert most == 3
    assert world.mux.stats().preemptions == 0


@pytest.mark.parametrize("order", [lambda waiting: float("nan"), lambda waiting: 1 / 0])
def test_an_order_that_fails_keeps_arrivals(order: Order) -> None:
    queue, _, errors = a_queue(order)
    for index in (2, 0, 1):
        queue.add(request_of(index))
    assert names(queue) == [0, 1, 2]
    assert len(errors) == 3
    assert isinstance(errors[0], ArgumentError)
    assert "request 2" in str(errors[0])


def test_a_policys_order_is_that_of_its_queue() -> None:
    policy: Any = Scripted([])
    policy.order = lambda waiting: -waiting.arrival_us
    world = World(policy, end_probability=0.0)
    for index in range(3):
        world.submit([index] * 5, 2)
        world.wait(1.0)
    world.step()
    assert [view.id for view in policy.seen[0].waiting] == [2, 1, 0]
    world.finish()


def test_an_order_of_a_policy_costs_nobody_a_token() -> None:
    policy: Any = Scripted([], lambda snapshot: None)
    policy.order = lambda waiting: "first"
    world = World(policy)
    with pytest.warns(RuntimeWarning, match="the order gave 'first'"):
        world.submit([1] * 5, 2)
    world.submit([2] * 5, 2)
    world.finish()
    assert len(world.mux.errors) >= 2


def test_no_such_order() -> None:
    policy: Any = Scripted([])
    policy.order = "random"
    with pytest.raises(ArgumentError, match="order='random': there is fcfs"):
        World(policy)
