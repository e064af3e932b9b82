"""Prompts and decode at once on the same SMs: two streams, and prompts on a part of the device."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.policies import Decision, Snapshot
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.timeline.trace import Span
from tests.runtime.doubles import ManualDevice, work
from tests.runtime.policies import Scripted
from tests.runtime.world import World


def sides(**given: Any) -> Any:
    """Every prompt in layers, one at a time, beside decode steps."""

    def decide(snapshot: Snapshot) -> Decision:
        if snapshot.prefill is not None:
            left = snapshot.num_layers - snapshot.prefill.layers_launched
            return Decision(layers=min(1, left), **given)
        rows = snapshot.max_running - snapshot.batch - snapshot.joining
        ids = tuple(request.id for request in snapshot.waiting[: min(1, rows)])
        return Decision(prefill=ids, layers=1 if ids else 0, **given)

    return Scripted([], decide)


def served(policy: Any) -> World:
    """A request decodes while a prompt of another runs."""
    world = World(policy, end_probability=0.0, shares=True)
    world.submit([1] * 8, 16)
    world.until(lambda: world.tokens[0])
    world.submit([2] * 45, 4)
    world.finish(wait_us=1.0)
    assert not world.mux.errors
    return world


def beside(world: World) -> list[tuple[Span, Span]]:
    """Decode steps and layers that ran at the same time."""
    spans = world.mux.timeline.trace().spans
    return [
        (step, layer)
        for step in spans
        for layer in spans
        if (step.lane, layer.lane) == ("decode", "prefill")
        and max(step.begin_us, layer.begin_us) < min(step.end_us, layer.end_us)
    ]


@pytest.mark.parametrize(
    ("given", "decode_sms", "prefill_sms"),
    [
        ({"shared": True}, 132, 132),
        ({"shared": True, "prefill_rung": 48}, 132, 84),
        ({"shared": True, "rung": 96, "prefill_rung": 48}, 96, 84),
        ({"shared": True, "rung": 48, "prefill_rung": None}, 48, 132),
        ({"rung": 16, "prefill_rung": 48}, 16, 84),
        ({"rung": 48}, 48, 84),
    ],
)
def test_both_sides_run_at_once(given: Any, decode_sms: int, prefill_sms: int) -> None:
    world = served(sides(**given))
    pairs = beside(world)
    assert pairs
    assert {(x.place.num_sms, y.place.num_sms) for x, y in pairs} == {(decode_sms, prefill_sms)}
    overlap = decode_sms + prefill_sms > 132
    splits = [sides for _, *sides in world.mux.timeline.trace().split()]
    assert [decode_sms, prefill_sms] in splits
    assert (world.device.overlap_us > 0) == overlap


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prefill_rung": 48},
        {"rung": 96, "prefill_rung": 48},
        {"rung": 48, "prefill_rung": None},
    ],
)
def test_sides_that_overlap_take_turns_where_they_may_not_share(given: Any) -> None:
    """And neither starves: a layer comes between any two steps while a batch runs."""
    world = served(sides(**given))
    assert world.device.overlap_us == 0
    assert not beside(world)
    assert all(sum(sides) <= 132 for _, *sides in world.mux.timeline.trace().split())
    spans = sorted(world.mux.timeline.trace().spans, key=lambda span: span.begin_us)
    kinds = "".join(span.lane[0] for span in spans)
    assert "pdpdpdp" in kinds


def test_where_the_lanes_are_one_stream_they_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDevice, "can_share", False)
    world = served(sides(shared=True))
    assert world.device.overlap_us == 0
    spans = sorted(world.mux.timeline.trace().spans, key=lambda span: span.begin_us)
    assert "pdpdpdp" in "".join(span.lane[0] for span in spans)


def test_no_layer_runs_beside_a_mixed_forward() -> None:
    """They have the same buffers; the next decision shares again."""

    def decide(snapshot: Snapshot) -> Decision:
        if not snapshot.batch:  # the first prompt as a chunk of a forward
            return Decision(prefill=tuple(x.id for x in snapshot.waiting[:1]), shared=True)
        ids = tuple(x.id for x in snapshot.waiting[:1]) if snapshot.prefill is None else ()
        layers = 4 if ids else 0
        if not ids and snapshot.prefill is not None:
            layers = snapshot.num_layers - snapshot.prefill.layers_launched
        return Decision(prefill=ids, layers=layers, shared=True)

    world = World(Scripted([], decide), end_probability=0.0, shares=True)
    world.submit([1] * 40, 8)
    world.submit([2] * 40, 8)
    world.finish(wait_us=1.0)
    spans = world.mux.timeline.trace().spans
    assert {"mixed", "prefill", "decode"} == {span.name for span in spans}
    pairs = beside(world)
    assert pairs
    assert all(step.name == "decode" for step, _ in pairs)


def test_lanes_that_share_wait_for_nobody_until_they_may_not() -> None:
    device = ManualDevice()
    lanes = Interleaver(device)
    lanes.aim(None, shared=True)
    lanes.launch("decode", work())
    assert lanes.can_launch("prefill")
    lanes.launch("prefill", work())
    lanes.aim(48)
    assert not lanes.can_launch("prefill")
    assert not lanes.can_launch("decode")
    device.end("prefill")
    lanes.poll()
    assert lanes.place_for("decode") == lanes.target("decode")
    assert not lanes.can_launch("prefill")
    lanes.aim(48, prefill=16, shared=True)
    assert lanes.place_for("prefill") == lanes.target("prefill")
