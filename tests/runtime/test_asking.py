"""When a policy is asked, and what it can see that is made only when it looks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from smkern.errors import ArgumentError, DecisionError
from smkern.policies import Chunked, Decision, Ended, Running, Snapshot, StaticSplit
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.scheduler import MOST_REST_US
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from smkern.runtime.timeline.timeline import Timeline
from tests.runtime.policies import Scripted, Sometimes
from tests.runtime.world import World, small_config


class Paced:
    """Decode steps that begin `every_us` after the one before, whatever else goes on."""

    def __init__(self, every_us: float) -> None:
        self._every_us = every_us
        self._next_us = 0.0
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen.append(snapshot)
        ids = tuple(request.id for request in snapshot.waiting[:1])
        if ids:
            return Decision(prefill=ids)
        left_us = self._next_us - snapshot.now_us
        if left_us > 0:
            return Decision(pause_decode=True, ask_again_us=left_us, reason="paced")
        self._next_us = snapshot.now_us + self._every_us
        return Decision()


def test_a_pause_ends_when_the_policy_said() -> None:
    policy = Paced(1000.0)
    world = World(policy, end_probability=0.0)
    world.submit([1] * 8, 5)
    world.run()
    times = [at_us for at_us, _ in world.outputs]
    gaps = [later - at_us for at_us, later in itertools.pairwise(times[1:])]
    # 1 us to launch the first step; the others have the same time to the token
    assert gaps == pytest.approx([1000.0] * 3, abs=1.0)
    assert {snapshot.trigger for snapshot in policy.seen} == {"idle", "timer"}
    assert not world.mux.errors


def test_asked_while_something_runs() -> None:
    """A timer counts from the decision, and is over when it asked once."""
    policy = Scripted([lambda s: Decision(prefill=(0,), ask_again_us=20.0)])
    world = World(policy, end_probability=0.0, device={"decode_launch_us": 0.0})
    world.submit([1] * 40, 2)  # 89 us
    world.run()
    begun, *others = policy.seen
    assert [(s.trigger, s.now_us) for s in others if s.trigger == "timer"] == [("timer", 20.0)]
    assert begun.now_us == 0.0


def test_an_event_before_the_time_replaces_it() -> None:
    policy = Scripted([lambda s: Decision(prefill=(0,), ask_again_us=1e6)])
    world = World(policy, end_probability=0.0)
    world.submit([1] * 20, 4)
    world.run()
    assert "timer" not in {snapshot.trigger for snapshot in policy.seen}
    assert world.device.now_us() < 1e4


@pytest.mark.parametrize("again_us", [100.0, 1e12])
def test_a_policy_that_rests_for_ever_stops_nobody(again_us: float) -> None:
    """Rests are bounded, whatever time it names and however often."""
    resting = Decision(pause_decode=True, ask_again_us=again_us)
    world = World(Scripted([], resting), end_probability=0.0)
    world.submit([1] * 8, 3)
    world.run()
    # The prompt's chunk, then two steps, each a rest later.
    assert world.device.now_us() == pytest.approx(3 * MOST_REST_US, rel=0.01)
    assert len(world.tokens[0]) == 3


def test_a_gang_is_over_before_a_timer_asks() -> None:
    script = [
        Decision(rung=48, prefill=(0,), layers=4),
        Decision(rung=48, join="gang", ask_again_us=1.0, steps=2),
    ]
    policy = Scripted(script)
    world = World(policy, end_probability=0.0)
    world.submit([1] * 40, 4)
    world.run()
    assert all(s.trigger != "timer" or not s.decode_queued for s in policy.seen)


@pytest.mark.parametrize("decodes", [False, True])
def test_tokens_go_out_between_a_batchs_begin_and_its_first_layers(decodes: bool) -> None:
    """Each takes the host as long as a group of layers; where nothing decodes nobody waits."""

    def split(snapshot: Snapshot) -> Decision:
        ids = tuple(request.id for request in snapshot.waiting)
        layers = bool(ids) or snapshot.prefill is not None
        return Decision(rung=48, prefill=ids, layers=int(layers), steps=2)

    policy = Scripted([], split)
    world = World(policy, end_probability=0.0)
    world.submit([1] * 8, 12)
    while decodes and not world.tokens.get(0):
        world.turn(1.0)
    policy.seen.clear()
    world.submit([2] * 8, 4)
    world.run()
    begun = [x for x in policy.seen if x.prefill is not None and not x.prefill.layers_launched]
    assert bool(begun) is decodes
    assert all(x.decode_queued for x in begun)
    assert len(world.tokens[1]) == 4


def test_the_first_failure_is_a_warning_and_all_are_kept() -> None:
    policy = Sometimes(Chunked(), lambda snapshot: Decision(prefill=None), range(9))  # type: ignore
    world = World(policy, end_probability=0.0)
    world.submit([1] * 8, 12)
    with pytest.warns(RuntimeWarning, match=r"prefill=None.*Multiplexer\.errors") as found:
        world.finish()
    assert len(found) == 1
    assert len(world.mux.errors) == 9
    assert all(isinstance(error, DecisionError) for _, error in world.mux.errors)


@pytest.mark.parametrize("policy", [StaticSplit, "chunked", 3, object()])
def test_what_is_no_policy_is_refused_at_once(policy: Any) -> None:
    with pytest.raises(ArgumentError, match="policy="):
        Multiplexer(SimExecutor(small_config(), num_pages=8), policy=policy)


def test_a_simulated_device_needs_a_predictor() -> None:
    with pytest.raises(ArgumentError, match=r"predictor=None.*ConstantRates\(\)"):
        SimExecutor(small_config(), SimDevice(132, (16,)), num_pages=8)


# What is made when it is looked at.


def test_running_requests_with_their_tokens_and_times() -> None:
    """In the order of `running_kv`, also in the middle of steps by which nobody ends."""
    found: list[tuple[Snapshot, tuple[Running, ...]]] = []

    def look(snapshot: Snapshot) -> Decision:
        found.append((snapshot, tuple(snapshot.running)))
        return Decision(prefill=tuple(x.id for x in snapshot.waiting))

    world = World(Scripted([], look), end_probability=0.0)
    world.submit([1] * 8, 9)
    world.submit([2] * 5, 12, priority=2)
    world.run()
    times: dict[int, list[float]] = {}
    for at_us, output in world.outputs:
        times.setdefault(output.id, []).append(at_us)
    assert len(found) > 10
    for snapshot, running in found:
        assert len(running) == snapshot.batch
        for request in running:
            so_far = [at_us for at_us in times[request.id] if at_us < snapshot.now_us]
            # Tokens that came just now are delivered, and handed out behind the launch.
            assert request.tokens_out - len(so_far) in (0, 1)
            if request.tokens_out:
                assert request.first_token_us <= request.last_token_us <= snapshot.now_us
        for request, kv in zip(running, snapshot.running_kv, strict=True):
            assert kv - request.prompt_tokens - request.tokens_out in (0, 1)
    last = {request.id: request for _, running in found for request in running}
    assert [last[id_].priority for id_ in (0, 1)] == [0, 2]
    assert last[1].first_token_us < last[1].last_token_us


def test_who_does_not_look_at_running_requests_pays_nothing() -> None:
    world = World(StaticSplit(48), end_probability=0.0)
    world.submit([1] * 8, 20)
    flushed: list[bool] = []
    plain = world.mux._launcher.flush
    world.mux._launcher.flush = lambda: flushed.append(True) or plain()  # type: ignore
    before = 0
    while not world.mux.is_idle:
        before += world.mux._launcher.steady is not None
        world.turn(5.0)
    assert before > 10
    assert len(flushed) < 6


def test_launches_that_ended_with_the_devices_times() -> None:
    found: list[Ended] = []
    policy = StaticSplit(48, layers=1)
    plain = policy.decide

    def decide(snapshot: Snapshot) -> Decision:
        ended = list(snapshot.ended)
        assert ended == sorted(ended, key=lambda x: x.ended_us)
        found.extend(ended)
        return plain(snapshot)

    policy.decide = decide  # type: ignore[method-assign]
    world = World(policy, end_probability=0.0)
    world.submit([1] * 8, 12)
    world.submit([2] * 40, 3)
    world.run()
    spans = [span for span in world.mux.timeline.trace().spans if span.is_over]
    known = {(x.lane, x.num_sms, x.size, x.began_us, x.ended_us) for x in found}
    assert len(known) == len(found) > 10
    all_of = {(s.lane, s.place.num_sms, s.size, s.begin_us, s.end_us) for s in spans}
    assert known <= all_of
    assert len(all_of - known) <= 1  # nobody is asked behind the last


def test_rungs_with_graphs_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def ready(self: SimExecutor, batch: int, longest: int) -> tuple[int | None, ...]:
        asked.append((batch, longest))
        return (None, 48)

    monkeypatch.setattr(SimExecutor, "ready_rungs", ready)
    policy = Scripted([], lambda s: Decision(prefill=tuple(x.id for x in s.waiting)))
    world = World(policy, end_probability=0.0)
    world.submit([1] * 8, 9)
    world.submit([2] * 5, 4)
    world.finish()
    seen = [(s.batch, max(s.running_kv)) for s in policy.seen if s.batch]
    assert asked == seen
    assert all(s.ready_rungs == ((None, 48) if s.batch else None) for s in policy.seen)


def test_reasons_are_in_the_saved_timeline(tmp_path: Path) -> None:
    policy = Scripted([], lambda s: Decision(prefill=tuple(x.id for x in s.waiting), reason="now"))
    world = World(policy)
    world.submit([1] * 8, 3)
    world.finish()
    path = world.mux.timeline.save(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "decision"}
    assert names == {"whole: now"}
    assert {choice.reason for choice in Timeline.load(path).choices} == {"now"}


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "joining"),
    [(60, 4, [1]), (60, 1, [0]), (100, 4, [0, 1])],
    ids=["it decodes next", "its first token is its last", "its prompt goes on"],
)
def test_who_joins(prompt: int, new_tokens: int, joining: list[int]) -> None:
    """While a batch's last layers run; one has 64 tokens at most."""
    world = World(StaticSplit(48, layers=1), end_probability=0.0, max_tokens=64)
    world.submit([1] * prompt, new_tokens)
    launcher, found = world.mux._launcher, []
    while not world.mux.is_idle:
        world.turn(5.0)
        if any(launched.batch is not None for launched in launcher.in_flight.values()):
            found.append(launcher.joining)
    assert [value for value, _ in itertools.groupby(found)] == joining
