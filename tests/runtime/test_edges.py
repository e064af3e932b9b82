"""What an owner may do that no ordinary loop does: odd values, other loops, strangers' pages."""

from __future__ import annotations

import gc
import weakref
from math import inf
from typing import Any

import pytest

from smkern.errors import ArgumentError, DeviceError, OutOfPagesError, StalledError
from smkern.kv import PagePool
from smkern.models import SamplingParams
from smkern.policies import Chunked, Decision, Snapshot, StaticSplit
from smkern.runtime.device import Work
from smkern.runtime.in_flight import AllOver, Written
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from tests.runtime.doubles import ManualEvent
from tests.runtime.test_steady_batch import a_request, queues_of
from tests.runtime.world import World, small_config


@pytest.mark.parametrize("name", ["arrival_us", "deadline_ms"])
@pytest.mark.parametrize("value", [True, 10**400, "1", -0.5, float("nan")])
def test_times_that_are_none_are_refused(name: str, value: Any) -> None:
    world = World()
    with pytest.raises(ArgumentError, match=f"{name}=.*or None"):
        world.mux.submit([1], **{name: value})
    assert world.mux.is_idle


def test_a_request_cannot_come_never() -> None:
    world = World()
    with pytest.raises(ArgumentError, match="arrival_us=inf"):
        world.mux.submit([1], arrival_us=inf)
    world.submit([1], 2, deadline_ms=inf)
    world.finish()


def test_another_runtimes_handle_cancels_nobody() -> None:
    one, other = World(), World()
    mine, its = one.submit([1], 2), other.submit([1], 2)
    with pytest.raises(ArgumentError, match="another Multiplexer"):
        one.mux.cancel(its)
    with pytest.raises(ArgumentError, match="True"):
        one.mux.cancel(True)
    one.finish()
    assert mine.completion is not None


def test_who_leaves_run_finds_the_rest_by_step() -> None:
    world = World(end_probability=0.0)
    for first in range(4):
        world.submit([first], 3)
    world._enter(next(world.mux.run()))
    world.finish()


def test_a_request_that_never_came_is_not_counted() -> None:
    world = World()
    world.cancel(world.submit([1], 2, arrival_us=1e6).id)
    stats = world.mux.stats()
    assert (stats.requests, dict(stats.finished)) == (0, {})


def test_pages_that_a_stranger_takes_while_one_decodes() -> None:
    """It cannot go on, and says so."""
    world = World(num_pages=10, page_size=4, end_probability=0.0)
    handle = world.submit([1] * 6, 20)
    world.until(lambda: world.tokens[handle.id], 20.0)
    world.executor.pool.allocate("a stranger", [2] * 20)
    world.may_fail = {handle.id}
    world.until(lambda: world.mux.is_idle)
    assert isinstance(handle.error, OutOfPagesError)
    assert "somebody else holds pages" in str(handle.error)
    world.executor.pool.release("a stranger")
    world.check_end()


def test_keys_of_a_launch_that_failed_are_not_found_again() -> None:
    """The device tells of the failure after the prompt was entered as computed."""
    world = World(Chunked(), end_probability=0.0, device={"faults": {0: "error"}})
    prompt = list(range(40))
    first = world.submit(prompt, 3)
    world.may_fail = {first.id}
    world.finish()
    assert isinstance(first.error, DeviceError)
    second = world.submit(prompt, 3)
    world.finish()
    assert second.completion is not None
    assert second.completion.cached_tokens == 0
    third = world.submit(prompt, 3)
    world.finish()
    assert third.completion is not None
    assert third.completion.cached_tokens == 36


@pytest.mark.slow
def test_a_loop_of_steps_alone_remembers_no_more_than_it_says() -> None:
    """Nobody calls `stats`, and `run`, which puts records in order, is not used."""
    world = World(StaticSplit(48, layers=1), end_probability=0.0, reuse=False)
    params = SamplingParams(max_new_tokens=1)
    for count in range(900):
        world.mux.submit([count % 50] * 40, params)
        for _ in range(8):
            world.mux.step()
            world.wait(30.0)
    assert len(world.mux.timeline._log) < 4200


def test_batch_invariant_chunks_have_room() -> None:
    with pytest.raises(ArgumentError, match=r"max_tokens=16.* at least 17"):
        World(batch_invariant=True, max_tokens=16)
    world = World(batch_invariant=True, max_tokens=17, max_prefill=2)
    for length in range(1, 60):
        world.submit([length % 50] * length, 2)
    world.finish()


def test_what_a_failed_launch_wrote_is_never_there() -> None:
    """Also where somebody asks for it before the next poll."""
    device = SimDevice(132, faults={0: "error"})
    lanes = Interleaver(device)
    ticket = lanes.launch("decode", Work("mixed", lambda place: None, about={"us": 5.0}))
    written = Written(ticket)
    assert not written.query()
    device.spend(10.0)
    assert not written.query()
    assert ticket.query(), "its pages are free, though"
    with pytest.raises(DeviceError):
        lanes.poll()


@pytest.mark.parametrize(
    "policy",
    [Chunked(chunk_tokens=16), StaticSplit(48, layers=1), StaticSplit(48, steps=4)],
    ids=str,
)
def test_waiting_requests_ask_for_pages_only_when_enough_came_back(policy, monkeypatch) -> None:
    world = World(policy, num_pages=10, page_size=4, end_probability=0.0, reuse=False)
    allocate, asked = PagePool.allocate, []

    def counting(pool: PagePool, request: Request, *args: Any) -> int:
        asked.append(pool.num_available >= pool.pages_for(len(request.ids)))
        return allocate(pool, request, *args)

    monkeypatch.setattr(PagePool, "allocate", counting)
    for id_ in range(4):
        world.submit([id_] * 20, 12)
    world.finish()
    assert all(asked)
    assert len(asked) == 4 + world.mux.stats().preemptions


def test_nobody_is_admitted_before_who_is_paused() -> None:
    """Small requests that keep coming would take its pages one after another, for ever."""
    queues = queues_of([20, 8], num_pages=9, preemption="keep")
    queues.pool.allocate("elsewhere", [1])
    for request in queues.running:
        request.num_pending = 1
    assert queues.reserve(1) == 1
    (paused,) = queues.paused
    queues.pool.release("elsewhere")
    assert not queues.admit(a_request(2, 2))
    urgent = a_request(3, 2)
    urgent.priority = 1
    assert queues.admit(urgent)
    assert paused.room == 8


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_handle_keeps_no_runtime_alive(is_cancelled: bool) -> None:
    """Owners keep handles for their tokens; models and pages are gigabytes."""
    executor = SimExecutor(small_config(), num_pages=64)
    mux = Multiplexer(executor)
    handle = mux.submit([1, 2, 3], SamplingParams(max_new_tokens=4, ignore_eos=True))
    for _ in mux.run():
        if is_cancelled and len(handle.tokens) == 2:
            handle.cancel()
    mux.close()
    kept = [weakref.ref(mux), weakref.ref(executor)]
    del mux, executor
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    assert len(handle.tokens) == (2 if is_cancelled else 4)
    handle.cancel()


@pytest.mark.parametrize("new", [1, 30])
def test_pages_that_never_come_back_are_reported(new: int) -> None:
    """Nothing is on its way then, so no launch could be said to hang."""
    world = World(num_pages=10, page_size=4, end_probability=0.0, stall_timeout_s=0.25)
    pool = world.executor.pool
    pool.allocate("a stranger", [1] * 24)
    pool.release("a stranger", ManualEvent())
    world.submit([2] * (20 if new == 1 else 4), new)
    with pytest.raises(StalledError, match=r"nothing could be launched for 0\.25 s"):
        list(world.mux.run())
    assert 0.25e6 < world.device.now_us() < 0.5e6


def test_a_loop_that_was_left_alone_for_long_does_not_stall() -> None:
    world = World(stall_timeout_s=0.25)
    world.submit([1], 3)
    world.wait(1e6)
    world.step()
    world.wait(1e6)
    world.finish()
    world.submit([1], 3)
    world.wait(1e6)
    world.finish()


def test_a_fence_that_failed_says_nothing_of_the_other_lane() -> None:
    class Failed:
        def query(self) -> bool:
            raise DeviceError("planted")

    assert not AllOver((Failed(), ManualEvent())).query()  # type: ignore[arg-type]
    assert AllOver((Failed(), Failed())).query()  # type: ignore[arg-type]


def test_closing_waits_for_nobody_who_would_have_come() -> None:
    """A moment that is past already would let no time go by."""
    world = World(end_probability=0.0)
    world.submit([1] * 30, 5)
    world.submit([2], 5, arrival_us=world.device.now_us() + 3.0)
    world.step()
    world.wait(3.0)
    world.close()


@pytest.mark.slow
def test_a_long_queue_is_shown_in_part_and_served_in_order() -> None:
    """A step's host time must not grow with the queue; who is not shown yet loses nothing."""
    seen: list[tuple[int, int]] = []
    policy = StaticSplit(48, steps=2)
    decide = policy.decide

    def spy(snapshot: Snapshot) -> Decision:
        seen.append((len(snapshot.waiting), snapshot.more_waiting))
        return decide(snapshot)

    policy.decide = spy  # type: ignore[method-assign]
    world = World(policy, end_probability=0.0)
    handles = [world.submit([1 + i % 7] * 9, 2) for i in range(600)]
    world.finish(most_steps=20_000)
    assert max(seen) == (256, 344)
    assert all(handle.completion is not None for handle in handles)
    assert list(world.ended) == sorted(world.ended)
