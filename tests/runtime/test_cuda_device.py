"""The clock of a GPU's events, on the host's."""

from __future__ import annotations

import pytest

from smkern.errors import DeviceError
from smkern.runtime.cuda_device import ANCHOR_US, Clock, CudaEvent


class FakeEvent:
    """An event at a moment of the device's own clock, microseconds."""

    def __init__(self, at_us: float, over: bool = True) -> None:
        self.at_us = at_us
        self.over = over

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at_us - self.at_us) / 1e3

    def query(self) -> bool:
        return self.over


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Device time 0 is host time 1000; the first tries took longer."""
    tries = iter([(9.0, 0.0, FakeEvent(5)), (2.0, 1000.0, FakeEvent(0)), (4.0, 1.0, FakeEvent(7))])
    monkeypatch.setattr(Clock, "_anchor", staticmethod(lambda stream: next(tries)))
    return Clock(None)


def test_between_what_the_host_knows(clock: Clock):
    at = clock.times_us(FakeEvent(50), FakeEvent(80), 1040.0, 1100.0)
    assert at == pytest.approx((1050, 1080))
    # nothing begins before it is launched: the device's clock is 30 us behind
    at = clock.times_us(FakeEvent(100), FakeEvent(120), 1130.0, 1160.0)
    assert at == pytest.approx((1130, 1150))
    at = clock.times_us(FakeEvent(200), FakeEvent(210), 1200.0, 1250.0)
    assert at == pytest.approx((1230, 1240))
    # nor ends after it was seen over
    at = clock.times_us(FakeEvent(300), FakeEvent(400), 1300.0, 1400.0)
    assert at == pytest.approx((1300, 1400))


def test_far_from_its_first_event(clock: Clock):
    end = FakeEvent(ANCHOR_US + 5)
    assert clock.times_us(FakeEvent(9), end, 0, 1e12)[1] == pytest.approx(1000 + ANCHOR_US + 5)
    assert clock._event is end
    after = clock.times_us(FakeEvent(ANCHOR_US + 6), FakeEvent(ANCHOR_US + 9), 0, 1e12)
    assert after == pytest.approx((ANCHOR_US + 1006, ANCHOR_US + 1009))


def test_an_event_is_over_once(clock: Clock):
    end = FakeEvent(20, over=False)
    event = CudaEvent(clock, FakeEvent(10), end, launched_us=0)
    assert not event.query()
    assert event.times_us() is None
    end.over = True
    assert event.query()
    assert event.times_us() == pytest.approx((1010, 1020))
    end.over = False
    assert event.query()


def test_an_error_of_the_device(clock: Clock):
    class Broken(FakeEvent):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    event = CudaEvent(clock, FakeEvent(0), Broken(1), 0)
    with pytest.raises(DeviceError, match="an illegal memory access was encountered"):
        event.query()


def test_events_come_back_once_their_times_are_known(clock: Clock):
    begin, end, back = FakeEvent(10), FakeEvent(20), []
    event = CudaEvent(clock, begin, end, 0, back.append)
    assert event.times_us() is None
    assert event.query()
    assert not back
    assert event.times_us() == event.times_us() == pytest.approx((1010, 1020))
    assert back == [(begin, end)]
