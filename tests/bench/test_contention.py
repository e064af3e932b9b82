"""Which calls of two queues count as side by side."""

from __future__ import annotations

import pytest

from smkern.bench.contention import MAX_CALLS, MIN_CALLS, Load, calls_in, spans_inside, window_us


def load(us: float) -> Load:
    return Load(lambda i: None, None, us)


def test_only_calls_while_both_are_busy_count_and_the_start_is_left_out():
    marks = {
        "read": [0.0, 10.0, 20.0, 30.0, 40.0, 50.0],
        "dense": [5.0, 25.0, 45.0, 105.0],
    }
    # common time 5 to 50, settled from 18.5 on
    found = spans_inside(marks)
    assert found == {"read": (10.0, 10.0, 10.0), "dense": (20.0,)}


def test_one_queue_alone_loses_its_start_only():
    assert spans_inside({"read": [0.0, 1.0, 2.0, 3.0, 4.0]}) == {"read": (1.0, 1.0)}


def test_queues_that_never_overlap_have_no_calls():
    assert spans_inside({"a": [0.0, 1.0], "b": [2.0, 3.0]}) == {"a": (), "b": ()}


@pytest.mark.parametrize(
    ("us", "window", "calls"), [(400.0, 40_000.0, 100), (15_000.0, 90_000.0, MIN_CALLS)]
)
def test_the_window_holds_enough_calls(us, window, calls):
    assert window_us({"one": load(us)}) == window
    assert calls_in(window, load(us)) == calls


def test_a_queue_is_never_longer_than_a_stream_takes():
    assert calls_in(90_000.0, load(10.0)) == MAX_CALLS
