"""What stops a runtime midway, who may drive it, and how it is closed whatever happened."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from typing import Any

import pytest

from smkern.errors import ArgumentError, EngineDeadError, ModelError, SmkernError, StalledError
from smkern.policies import Chunked
from smkern.runtime.owner import Owner
from tests.runtime.busy import busy, survivors
from tests.runtime.world import World


def spoil(owner: Any, name: str, error: BaseException, turn: int = 2) -> None:
    """Let one call of a method raise, the `turn`th from now."""
    method, left = getattr(owner, name), [turn]

    def spoiled(*given: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise error
        return method(*given, **options)

    setattr(owner, name, spoiled)


def ends(world: World) -> None:
    """All requests have ended, once each; nothing is held; no more is taken, by name."""
    world.may_fail = None
    for output in world.mux.run():
        world._enter(output)
    world.check()
    for handle in world.handles:
        assert handle.done
        assert (handle.error is None) == (handle.completion is not None)
        assert handle.error is None or isinstance(handle.error, EngineDeadError)
    with pytest.raises(EngineDeadError, match=r"submit.*planted"):
        world.mux.submit([1, 2, 3])
    with pytest.raises(EngineDeadError, match=r"step.*planted"):
        world.mux.step()
    world.mux.close()
    assert world.executor.pool.requests == ()
    assert world.executor.pool.usage.held == 0


@pytest.mark.parametrize("what", ["forget", "release", "commit"])
@pytest.mark.parametrize("turn", [1, 4])
def test_a_pool_or_an_executor_that_raises_ends_all_by_name(what: str, turn: int) -> None:
    world = busy(count=6)
    owner = world.watch if what == "forget" else world.executor.pool
    spoil(owner, what, OSError("planted"), turn)
    ends(world)
    assert world.mux.dead is not None


def test_a_read_that_raises_fails_its_own_requests() -> None:
    world = busy(count=2, new=30)
    world.until(lambda: all(len(world.tokens[i]) > 3 for i in range(2)))
    decode = world.watch.decode

    def failing(*given: Any) -> Any:
        works = decode(*given)
        spoil(works[0][1], "read", OSError("planted"), 1)
        world.watch.decode = decode  # type: ignore[method-assign]
        return works

    world.watch.decode = failing  # type: ignore[method-assign]
    world.until(lambda: world.watch.decode is decode)
    third = world.submit([3, 4, 5], 6)
    world.may_fail = {0, 1}
    world.finish()
    assert survivors(world) == [third.id]
    for handle in world.handles[:2]:
        assert isinstance(handle.error, ModelError)
        assert "OSError while its tokens were read: planted" in str(handle.error)


def test_an_interrupt_in_a_step_ends_all_by_name() -> None:
    for turn in (1, 5, 12):
        world = busy(count=6)
        spoil(world.device, "launch", KeyboardInterrupt("planted"), turn)
        with pytest.raises(KeyboardInterrupt):
            world.finish()
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt in the middle of step"):
            world.mux.step()
        with pytest.raises(EngineDeadError):
            list(world.mux.run())
        world.close()


def test_an_interrupt_of_a_wait_ends_nothing() -> None:
    world = busy(count=3)
    spoil(world.device, "wait", KeyboardInterrupt("planted"))
    outputs = world.mux.run()
    with suppress(KeyboardInterrupt):
        while True:
            world._enter(next(outputs))
    assert not all(handle.done for handle in world.handles)
    world.finish()
    assert len(survivors(world)) == 3


def on_a_thread(call: Any) -> list[BaseException]:
    found: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except SmkernError as error:
            found.append(error)

    thread = Thread(target=run, name="another")
    thread.start()
    thread.join()
    return found


def test_another_thread_is_refused_and_told_who_drives_it() -> None:
    world = busy(count=1)
    mux, handle = world.mux, world.handles[0]
    for call in (
        lambda: mux.submit([1]),
        mux.step,
        lambda: list(mux.run()),
        handle.cancel,
        mux.close,
    ):
        (error,) = on_a_thread(call)
        assert isinstance(error, ArgumentError)
        assert "on thread 'another': this Multiplexer is driven by thread 'MainThread'" in str(
            error
        )
    world.finish()


def test_a_thread_that_has_ended_hands_it_over() -> None:
    world = World()
    assert on_a_thread(lambda: world.submit([1, 2, 3], 4)) == []
    world.finish()
    assert survivors(world) == [0]


@pytest.mark.parametrize("attempt", range(20))
def test_a_thread_with_the_number_of_one_that_has_ended_is_another(attempt: int) -> None:
    """The system gives numbers again, but not each time."""
    owner, entered, goes_on = Owner(), Event(), Event()

    def enter() -> None:
        owner.enter("step")
        owner.is_inside = False

    def enter_and_stay() -> None:
        enter()
        entered.set()
        goes_on.wait()

    second = Thread(target=enter_and_stay, name="second")
    assert on_a_thread(enter) == []
    second.start()
    entered.wait()
    try:
        with pytest.raises(ArgumentError, match="is driven by thread 'second'"):
            owner.enter("step")
    finally:
        goes_on.set()
        second.join()


def test_a_call_from_inside_a_step_is_refused() -> None:
    found: list[str] = []

    class Curious:
        def decide(self, snapshot: Any) -> Any:
            for call in (world.mux.step, world.mux.close, world.handles[0].cancel):
                with pytest.raises(ArgumentError) as caught:
                    call()
                found.append(str(caught.value))
            raise ValueError("and goes on by the plain decision")

    world = busy(Curious(), count=1)
    with pytest.warns(RuntimeWarning):
        world.step()
    assert len(found) >= 3
    assert all("from inside a call of this Multiplexer" in text for text in found)
    world.finish()


def test_a_hang_is_given_up_by_force() -> None:
    world = busy(device={"faults": {4: "hang"}}, stall_timeout_s=0.25)
    with pytest.raises(StalledError):
        list(world.mux.run())
    for _ in range(2):
        with pytest.raises(StalledError):
            world.mux.close()
    closed: list[bool] = []
    world.watch.close = lambda: closed.append(True)  # type: ignore[method-assign]
    world.mux.close(force=True)
    assert not closed, "work of the executor is still on its way"
    assert world.mux.is_idle
    assert all(handle.done for handle in world.handles)
    assert world.executor.pool.requests == ()
    assert world.executor.pool.poll() > 0, "pages of what hangs are not given to others"
    world.mux.close()


def test_force_waits_for_what_ends() -> None:
    world = busy()
    for _ in range(9):
        world.step()
    assert world.mux._launcher.in_flight
    closed: list[bool] = []
    world.watch.close = lambda: closed.append(True)  # type: ignore[method-assign]
    world.mux.close(force=True)
    assert closed
    assert world.executor.pool.usage.held == 0


@pytest.mark.parametrize("what", ["release", "forget", "close"])
def test_what_raises_while_it_is_closed_leaves_nothing_behind(what: str) -> None:
    world = busy()
    for _ in range(30):
        world.turn(20.0)
    spoil(world.executor.pool if what == "release" else world.watch, what, OSError("x"), 1)
    if what == "close":
        with pytest.raises(EngineDeadError, match="OSError while this Multiplexer was closed"):
            world.mux.close()
    world.close()


def test_closing_long_after_requests_waited_in_vain_is_no_hang() -> None:
    world = World(num_pages=20, page_size=4, stall_timeout_s=0.25)
    world.executor.pool.allocate("a stranger", [1] * 60)
    world.submit([1, 2], 3)
    world.may_fail = {world.submit([1] * 40, 5).id}
    for _ in range(40):
        world.turn(10.0)
    assert not world.mux._launcher.in_flight
    world.mux._watchdog.look(world.device.now_us(), False, (), True)
    world.wait(1e6)
    world.mux.close()
    assert world.executor.pool.requests == ("a stranger",)


def test_who_ends_leaves_behind_its_steps_tokens_where_another_step_runs() -> None:
    world = busy(Chunked(48, steps=2), count=3, new=12)
    first = world.submit([7, 8, 9], 4)
    while not (outputs := [x for x in world.step() if x.id == first.id and x.completion]):
        world.wait(5.0)
    (output,) = outputs
    assert first.done
    assert first.completion is output.completion
    pool = world.executor.pool
    assert first._request in pool.requests  # its pages come back behind the tokens
    first.cancel()
    assert first._request not in pool.requests
    assert not first.cancelled
    world.finish()


def test_ends_are_handed_out_behind_the_other_tokens_of_a_step() -> None:
    """Who reads them submits the next prompt, say, while the other tokens would wait."""
    world = busy(Chunked(48, steps=2), count=3, new=12)
    world.until(lambda: len(world.tokens[2]) > 2)
    world.submit([7, 8, 9], 1)  # a mixed forward draws for it first
    outputs = world.step()
    while all(x.id != 3 for x in outputs):
        world.wait(5.0)
        outputs = world.step()
    assert [x.id for x in outputs] == [0, 1, 2, 3]
    world.finish()
