"""Two lanes under any order of launches, ends and moves of the split."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import LANES
from tests.runtime.doubles import ManualDevice, work

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("aim"), st.sampled_from([None, 16, 48, 96])),
        st.tuples(st.just("alone"), st.sampled_from([16, 48, 96])),
        st.tuples(st.just("launch"), st.sampled_from(LANES)),
        st.tuples(st.just("end"), st.sampled_from(LANES)),
        st.tuples(st.just("poll"), st.none()),
    ),
    max_size=60,
)


def act(lanes: Interleaver, device: ManualDevice, action: str, what: object) -> None:
    if action == "aim":
        lanes.aim(what)  # type: ignore[arg-type]
    elif action == "alone":
        lanes.aim(what, prefill=None)  # type: ignore[arg-type]
    elif action == "end":
        device.end(what)  # type: ignore[arg-type]
    elif action == "poll":
        lanes.poll()
    elif lanes.can_launch(what):  # type: ignore[arg-type]
        lanes.launch(what, work())  # type: ignore[arg-type]


@given(ACTIONS)
@settings(max_examples=200)
def test_nothing_ever_overlaps_and_a_lane_alone_is_never_stuck(actions) -> None:
    device = ManualDevice()
    lanes = Interleaver(device)
    for action, what in actions:
        act(lanes, device, action, what)
        running = [x for x in device.launched if not x[3].over]
        for lane, place, _, _ in running:
            for other, where, _, _ in running:
                assert lane == other or not place.overlaps(where)
        for lane, other in (LANES, LANES[::-1]):
            if not lanes.queued(other):
                assert lanes.place_for(lane) == lanes.target(lane)
    lanes.drain()
    for lane in LANES:
        assert lanes.place_for(lane) == lanes.target(lane)


@given(ACTIONS)
@settings(max_examples=200)
def test_impatience_overlaps_only_what_was_launched_before_the_switch(actions) -> None:
    device = ManualDevice()
    lanes = Interleaver(device, impatient=True)
    aimed: list[int] = []  # for each launch, how many switches had been asked for
    switches = 0
    for action, what in actions:
        if action == "alone":
            continue
        before = len(device.launched)
        switches += action == "aim"
        act(lanes, device, action, what)
        if len(device.launched) == before:
            continue
        aimed.append(switches)
        lane, place, _, _ = device.launched[-1]
        for at, (other, where, _, event) in enumerate(device.launched[:-1]):
            if other != lane and not event.over and place.overlaps(where):
                assert aimed[at] < switches
                assert "whole" not in (place.side, where.side)
