"""Bad input and faults: what fails is named, the others go on, and pages come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smkern.errors import (
    ArgumentError,
    DeviceError,
    ModelError,
    OutOfPagesError,
    RequestError,
    SmkernError,
    StalledError,
)
from smkern.policies import Decision, Snapshot
from smkern.runtime.launcher import BatchLauncher
from tests.models.generation import Letters
from tests.runtime.busy import EVERY_POLICY, TEXTS, busy, each_policy, survivors
from tests.runtime.policies import RandomPolicy, Scripted, Sometimes
from tests.runtime.world import World


@each_policy
@pytest.mark.parametrize("launch", [0, 1, 3, 8, 15])
def test_a_launch_that_raises_takes_its_own_requests_along(policy: str, launch: int) -> None:
    world = busy(EVERY_POLICY[policy](), device={"faults": {launch: "raise"}})
    world.may_fail = None
    world.finish()
    failed = [handle for handle in world.handles if handle.error is not None]
    assert len(failed) + len(survivors(world)) == len(world.handles)
    assert all(isinstance(handle.error, ModelError) for handle in failed)
    assert all("RuntimeError while work was launched" in str(x.error) for x in failed)
    assert all(handle.done and handle.completion is None for handle in failed)


def test_a_prefill_that_raises_leaves_decoding_requests_alone() -> None:
    world = busy(count=2)
    world.until(lambda: all(world.tokens[i] for i in range(2)))
    third = world.submit(TEXTS[2], 5)
    world.may_fail = {third.id}
    original = world.executor.prefill

    def failing(run: Any, first: int, count: int) -> Any:
        if first == 2:
            raise ZeroDivisionError("planted")
        return original(run, first, count)

    world.executor.prefill = failing  # type: ignore[method-assign]
    world.finish()
    assert isinstance(third.error, ModelError)
    assert "ZeroDivisionError" in str(third.error)
    assert "planted" in str(third.error)
    assert survivors(world) == [0, 1]


@each_policy
@pytest.mark.parametrize("launch", [0, 2, 5, 9])
def test_a_device_that_is_lost_fails_all_that_is_on_its_way(policy: str, launch: int) -> None:
    """Nothing runs on it any more, so requests that come later fail too, and nothing hangs."""
    world = busy(EVERY_POLICY[policy](), device={"faults": {launch: "lost"}})
    world.may_fail = None
    world.finish(most_steps=500)
    failed = [handle for handle in world.handles if handle.error is not None]
    assert failed
    assert all(isinstance(handle.error, SmkernError) for handle in failed)
    assert any(isinstance(handle.error, DeviceError) for handle in failed)


@pytest.mark.parametrize("launch", [0, 3, 8])
def test_an_error_of_one_launch_fails_its_requests_alone(launch: int) -> None:
    """Where the device can tell whose launch it was."""
    world = busy(device={"faults": {launch: "error"}})
    world.may_fail = None
    world.finish(most_steps=2000)
    failed = [handle for handle in world.handles if handle.error is not None]
    assert 0 < len(failed) < len(world.handles)
    assert all(isinstance(handle.error, DeviceError) for handle in failed)


@each_policy
def test_a_device_that_hangs_is_reported_in_time(policy: str) -> None:
    world = busy(EVERY_POLICY[policy](), device={"faults": {4: "hang"}}, stall_timeout_s=0.25)
    world.may_fail = None

    def serve() -> None:
        while True:
            world.step()
            world.wait(1000.0)

    with pytest.raises(StalledError, match=r"nothing has ended for 0\.25 s") as caught:
        serve()
    assert "raise stall_timeout_s" in str(caught.value)
    assert world.device.now_us() < 2e6
    assert world.mux.timeline is not None


def test_run_finds_a_hang_too_and_the_timeline_shows_it(tmp_path: Path) -> None:
    world = busy(device={"faults": {4: "hang"}}, stall_timeout_s=0.25)
    with pytest.raises(StalledError):
        list(world.mux.run())
    assert 2.5e5 < world.device.now_us() < 2e6
    world.mux.timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] in "XB"]
    assert names.count("decode") + names.count("prefill") >= 4


# Requests that cannot be.


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, RequestError, "is empty"),
        ([1], {"priority": 1.5}, ArgumentError, "priority=1.5"),
    ],
)
def test_what_cannot_be_served_is_refused_when_it_comes(prompt, options, error, message) -> None:
    world = World(num_pages=16, page_size=4)
    first = world.submit([1, 2, 3], 4)
    with pytest.raises(error, match=message):
        world.submit(prompt, **options)
    assert world.submit([4], 2).id == first.id + 1, "a refused request has no number"
    world.finish()


def test_pages_that_somebody_else_holds() -> None:
    world = World(num_pages=20, page_size=4)
    world.executor.pool.allocate("a stranger", [1] * 60)
    handle = world.submit([1] * 40, 5)
    small = world.submit([2, 3], 3)
    world.may_fail = {handle.id}
    world.until(lambda: world.mux.is_idle)
    assert isinstance(handle.error, OutOfPagesError)
    assert "somebody else holds pages" in str(handle.error)
    assert small.completion is not None
    world.executor.pool.release("a stranger")
    world.check_end()


# Loops that end early.


def test_closing_gives_everything_back() -> None:
    for after in (0, 1, 4, 9, 25, 60):
        world = busy(RandomPolicy(after))
        for _ in range(after):
            world.turn(20.0)
        world.close()
        world.mux.close()
        with pytest.raises(ArgumentError, match="is closed: make another"):
            world.submit([1], 1)


def test_leaving_run_early_loses_nothing() -> None:
    """It is only a loop: another one goes on where it was left."""
    world = busy(count=4)
    first = []
    for output in world.mux.run():
        first.append(output)
        if len(first) == 7:
            break
    rest = list(world.mux.run())
    by_id: dict[int, list[int]] = {}
    for output in [*first, *rest]:
        by_id.setdefault(output.id, []).append(output.token)
    assert by_id == world.expected


# Policies that misbehave.


@each_policy
def test_a_policy_that_raises(policy: str) -> None:
    def fail(snapshot: Snapshot) -> Decision:
        raise KeyError("planted")

    world = busy(Sometimes(EVERY_POLICY[policy](), fail, range(1, 30, 2)))
    world.finish()
    assert len(survivors(world)) == len(world.handles)
    assert any("the policy raised KeyError: 'planted'" in str(e) for _, e in world.mux.errors)


@pytest.mark.parametrize(
    "lazy",
    [
        Decision(pause_decode=True),
        Decision(rung=48),
        Decision(rung=48, pause_decode=True),
        Decision(),
    ],
    ids=str,
)
def test_a_policy_that_does_nothing_stops_nobody(lazy: Decision) -> None:
    world = busy(Scripted([], then=lazy))
    world.finish()
    assert len(survivors(world)) == len(world.handles)
    assert any("the policy launched nothing" in str(e) for _, e in world.mux.errors)


def test_a_policy_that_asked_is_not_blamed_where_nothing_could_be_launched(monkeypatch) -> None:
    world = World()
    world.submit([1, 2, 3], 6)
    refused, decode = [], BatchLauncher.decode

    def short_of_pages(launcher: BatchLauncher, steps: int) -> int:
        if not launcher.in_flight and not refused:
            refused.append(steps)
            return 0
        return decode(launcher, steps)

    monkeypatch.setattr(BatchLauncher, "decode", short_of_pages)
    world.finish()
    assert refused
    assert not world.mux.errors


# Callbacks that raise.


class Failing(Letters):
    """A tokenizer that raises when it decodes a text of some length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if len(token_ids) >= self._length and 5 in token_ids:
            raise UnicodeError("planted")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise UnicodeError("planted")
        return super().encode(text)


def test_a_tokenizer_that_raises_fails_its_request() -> None:
    world = busy(tokenizer=Failing(3), count=6, new=20)
    world.may_fail = None
    world.finish()
    failed = [handle for handle in world.handles if handle.error is not None]
    assert 0 < len(failed) < len(world.handles)
    assert all(isinstance(handle.error, RequestError) for handle in failed)
    assert all("UnicodeError" in str(handle.error) for handle in failed)


def test_a_tokenizer_that_raises_at_a_prompt() -> None:
    world = World(tokenizer=Failing(99))
    with pytest.raises(RequestError, match="UnicodeError: planted"):
        world.mux.submit("no!")
    world.submit([1, 2], 3)
    world.finish()


# Pages that run out.


def test_who_gives_pages_back_is_forgotten_before_it_begins_anew() -> None:
    """Else what the executor keeps of its new batch is dropped."""
    # Three prompts are half computed, and none has the pages to go on.
    world = World(
        Scripted([], then=_next_chunk), num_pages=20, page_size=4, max_tokens=24, max_prefill=1
    )
    for first in range(3):
        world.submit([first] * 50, 3)
    world.finish()
    assert len(survivors(world)) == 3


def _next_chunk(snapshot: Snapshot) -> Decision:
    """A chunk of the prompt of which least is computed, layer by layer."""
    if snapshot.prefill is not None:
        return Decision(rung=48, layers=snapshot.num_layers - snapshot.prefill.layers_launched)
    if not snapshot.waiting:
        return Decision(rung=48)
    least = min(snapshot.waiting, key=lambda x: (x.cached, x.id))
    return Decision(rung=48, prefill=(least.id,), chunk_tokens=24, layers=4)
