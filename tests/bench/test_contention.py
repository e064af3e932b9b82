"""Which calls of two queues count as side by side."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from smkern.bench.contention import (
    MAX_CALLS,
    MIN_CALLS,
    NEIGHBOUR_S,
    ROUNDS,
    Load,
    calls_in,
    spans_inside,
    time_beside,
    window_us,
)


def load(us: float) -> Load:
    return Load(lambda i: None, None, us)


def test_only_calls_while_both_are_busy_count_and_the_start_is_left_out():
    marks = {"read": [0.0, 10.0, 20.0, 30.0, 40.0, 50.0], "dense": [5.0, 25.0, 45.0, 105.0]}
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


class TwoStreams:
    """Streams that run side by side, each in order, after a host that takes no time."""

    def __init__(self, monkeypatch) -> None:
        self.now_us = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def load(self, us: float, expected_us: float | None = None) -> Load:
        return self.on(_Stream(self), us, expected_us)

    def on(self, stream, us: float, expected_us: float | None = None) -> Load:
        def call(i: int) -> None:
            stream.starts_us.append(stream.end())
            stream.end_us = stream.end() + us

        return Load(call, stream, us if expected_us is None else expected_us)


class _Stream:
    def __init__(self, device: TwoStreams) -> None:
        self.device, self.end_us, self.starts_us = device, 0.0, []

    def end(self) -> float:
        return max(self.end_us, self.device.now_us)

    def synchronize(self) -> None:
        self.device.now_us = self.end()


class _Event:
    def __init__(self, device: TwoStreams) -> None:
        self.device, self.at_us = device, 0.0

    def record(self, stream) -> None:
        self.at_us = stream.end()

    def synchronize(self) -> None:
        self.device.now_us = max(self.device.now_us, self.at_us)

    def query(self) -> bool:
        return self.at_us <= self.device.now_us

    def elapsed_time(self, other) -> float:
        return (other.at_us - self.at_us) / 1e3


class CountedClock:
    readings = 0

    def read(self) -> None:
        self.readings += 1

    def mhz(self) -> float:
        return 1500.0


def test_probes_begin_when_the_clock_has_fallen_and_have_the_same_neighbour(monkeypatch):
    device, clock = TwoStreams(monkeypatch), CountedClock()
    neighbour, read = device.load(1000.0), device.load(400.0)
    cached = device.on(read.stream, 100.0)
    found = time_beside({"read": read, "cached": cached}, neighbour, clock)
    assert found.probes["read"].us_all == (400.0,) * ROUNDS
    assert found.probes["cached"].us_all == (100.0,) * ROUNDS
    assert found.neighbour.us_median == 1000.0
    assert (found.sm_mhz, clock.readings) == (1500.0, 2 * ROUNDS)
    assert read.stream.starts_us[0] == 1e6 * NEIGHBOUR_S
    assert neighbour.stream.end_us > read.stream.end_us


def test_a_neighbour_that_ran_dry_is_given_more_to_do(monkeypatch):
    device = TwoStreams(monkeypatch)
    neighbour, slow = device.load(1000.0), device.load(400.0, expected_us=50.0)
    found = time_beside({"read": slow}, neighbour)
    assert found.probes["read"].us_all == (400.0,) * ROUNDS
    assert neighbour.stream.end_us > slow.stream.end_us
    assert len(slow.stream.starts_us) > ROUNDS * calls_in(40_000.0 / ROUNDS, slow, least=1)
