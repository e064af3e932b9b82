"""Bubbles of both definitions, against sums made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.policies import Decision
from smkern.runtime.place import Place
from smkern.runtime.timeline.bubbles import BubbleMeter, Bubbles, bubbles, gaps
from smkern.runtime.timeline.trace import Span, State
from tests.runtime.timeline.timelines import Script, batch_of, snapshot_at, waiting

SPLIT = Decision(rung=32)


def measured(script: Script) -> Bubbles:
    """Of what was recorded; the meter fed as it came must agree with the trace's."""
    return bubbles(script.timeline.trace())


def test_nothing_ran():
    assert measured(Script()) == Bubbles()
    assert Bubbles().ratio == Bubbles().muxwise_ratio == 0.0


def test_back_to_back_launches_leave_none():
    script = Script()
    for begin in (0.0, 10.0, 20.0):
        script.ran("decode", begin, begin + 10, launched_us=0)
    found = measured(script)
    assert (found.decode.busy_us, found.decode.bubble_us, found.ratio) == (30, 0, 0)
    assert found.muxwise_ratio == 0


def test_both_ratios_by_hand():
    """decode 0-10, 14-24 while a request decodes; prefill 4-12 and then nothing to do.

    Decode: 4 us of 24 with no kernel, all of it with work. Prefill: 16 us of 24 with no kernel,
    none of it with work.
    """
    script = Script()
    script.decided(0, SPLIT, running_kv=(9,), prefill=batch_of(1))
    script.ran("decode", 0, 10)
    script.decided(12, SPLIT, running_kv=(9,))
    script.ran("prefill", 4, 12, launched_us=0)
    script.ran("decode", 14, 24)
    found = measured(script)
    assert found.decode.bubble_us == 4
    assert found.decode.ratio == pytest.approx(4 / 24)
    # launched at 0, so there was work before it began: 0-4
    assert found.prefill.bubble_us == 4
    assert found.prefill.ratio == pytest.approx(4 / 12)
    assert found.ratio == pytest.approx((4 / 24 + 4 / 12) / 2)
    assert found.muxwise_ratio == pytest.approx((4 / 24 + 16 / 24) / 2)


def test_time_without_work_is_no_bubble():
    script = Script()
    script.decided(0, Decision(), running_kv=(9,))
    script.ran("decode", 0, 10)
    script.timeline.state(10, decoding=0)
    script.decided(1000, Decision(), running_kv=(9,))
    script.ran("decode", 1005, 1010, launched_us=1004)
    found = measured(script)
    assert found.decode.bubble_us == 5
    assert found.decode.ratio == pytest.approx(5 / 20)
    assert found.decode.idle_ratio == pytest.approx(995 / 1010)


def test_work_that_is_launched_and_not_begun_is_work():
    """An engine that tells no states: from the launch on there was something to run."""
    script = Script()
    script.ran("decode", 0, 10)
    script.ran("decode", 30, 40, launched_us=25)
    assert measured(script).decode.bubble_us == 5


def test_work_that_nobody_ran_until_the_window_ends():
    script = Script()
    script.decided(0, SPLIT, running_kv=(9,), waiting=waiting(1))
    script.ran("decode", 0, 10)
    script.ran("prefill", 0, 50)
    found = measured(script)
    assert found.decode.bubble_us == 40
    assert found.prefill.bubble_us == 0


def test_a_lane_that_ran_nothing_is_left_out_of_the_means():
    script = Script()
    script.ran("decode", 0, 10)
    found = measured(script)
    assert found.prefill.launches == 0
    assert found.muxwise_ratio == found.decode.idle_ratio == 0


@pytest.mark.parametrize(
    ("state", "decode", "prefill"),
    [
        (State(0), False, False),
        (State(0, decoding=1), True, False),
        (State(0, prefilling=1), False, True),
        (State(0, waiting=1), True, False),  # a mixed forward on the decode lane
        (State(0, waiting=1, is_split=True), False, True),
        (State(0, waiting=1, is_blocked=True), False, False),
        (State(0, waiting=1, prefilling=1), False, True),
    ],
)
def test_which_lane_has_work(state, decode, prefill):
    assert (state.has_work("decode"), state.has_work("prefill")) == (decode, prefill)


@pytest.mark.parametrize(
    ("snapshot", "is_blocked"),
    [
        ({"waiting": waiting(1, pages=3), "free_pages": 3}, False),
        ({"waiting": waiting(1, pages=3), "free_pages": 2}, True),
        ({"waiting": waiting(1), "running_kv": (1,) * 8}, True),
        ({}, False),
    ],
)
def test_requests_that_cannot_begin_are_no_work(snapshot, is_blocked):
    script = Script()
    script.timeline.decided(snapshot_at(5.0, **snapshot), SPLIT)
    states = script.timeline.trace().states
    assert [state.is_blocked for state in states] == ([is_blocked] if snapshot else [False])


def test_gaps_name_their_bubbles():
    script = Script()
    script.decided(0, SPLIT, running_kv=(9,))
    script.ran("decode", 0, 10)
    script.timeline.state(12, decoding=0)
    script.ran("decode", 20, 30, launched_us=19)
    (gap,) = gaps(script.timeline.trace())
    assert (gap.lane, gap.begin_us, gap.end_us, gap.bubble_us) == ("decode", 10, 20, 3)


lengths = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["decode", "prefill"])),
    min_size=1,
    max_size=30,
)


@given(lengths, st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=20))
def test_any_timeline_adds_up(launches, changes):
    """Against a count of every microsecond, whatever the lanes ran."""
    script = Script()
    states = sorted(dict(changes).items())
    for at_us, has_work in states:
        script.timeline.state(at_us, decoding=int(has_work), prefilling=int(has_work))
    ends = {"decode": 0, "prefill": 0}
    spans = []
    for gap, length, lane in launches:
        begin = ends[lane] + gap
        ends[lane] = begin + length
        spans.append((lane, begin, begin + length))
        script.ran(lane, begin, begin + length)
    found = measured(script)
    first, last = min(s[1] for s in spans), max(s[2] for s in spans)
    for lane, lane_found in (("decode", found.decode), ("prefill", found.prefill)):
        mine = [(begin, end) for name, begin, end in spans if name == lane]
        if not mine:
            continue
        busy = bubble = 0
        for at in range(first, last):
            runs = any(begin <= at < end for begin, end in mine)
            has = [has for since, has in states if since <= at]
            busy += runs
            bubble += not runs and bool(has and has[-1])
        assert (lane_found.busy_us, lane_found.bubble_us) == (busy, bubble)
        assert lane_found.window_us == last - first


def test_a_meter_keeps_nothing_of_what_has_passed():
    meter = BubbleMeter()
    script = Script(capacity=0)
    script.timeline.attach(meter)
    for i in range(100):
        script.timeline.state(20 * i, decoding=1 + i % 2)
        script.timeline.state(20 * i + 12, decoding=0)
        script.ran("decode", 20 * i, 20 * i + 10)
    script.timeline.settle()
    assert meter.bubbles().decode.bubble_us == 2 * 100 - 2
    assert len(meter._lanes["decode"]._changes) < 3
    assert script.timeline.trace().spans == ()


def test_a_lane_that_launches_nothing_for_long_remembers_little(monkeypatch):
    """And counts the same."""

    def fed() -> BubbleMeter:
        meter = BubbleMeter()
        meter.span(span_at(0.0, 10.0))
        for index in range(51):
            meter.state(State(5.0 + index, decoding=1 - index % 2))
        return meter

    everything = fed()
    monkeypatch.setattr("smkern.runtime.timeline.bubbles.CHANGES", 8)
    meter = fed()
    assert len(meter._lanes["decode"]._changes) <= 8
    assert len(everything._lanes["decode"]._changes) > 8
    for fed_one in (meter, everything):
        fed_one.span(span_at(70.0, 80.0, number=1))
    assert meter.bubbles() == everything.bubbles()


def span_at(begin_us: float, end_us: float, number: int = 0) -> Span:
    return Span(number, "decode", Place.whole(132), "step", begin_us, begin_us, end_us, end_us)
