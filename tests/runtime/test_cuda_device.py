"""The clock of a GPU's events, on the host's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smkern.errors import ArgumentError, DeviceError, PartitionError
from smkern.runtime import cuda_device
from smkern.runtime.cuda_device import ANCHOR_US, Clock, CudaDevice, CudaEvent
from smkern.runtime.device import Work
from smkern.runtime.place import LANES, Place


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
    event = CudaEvent(clock, FakeEvent(10), end, 0, recycle=lambda pair: None)
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

    event = CudaEvent(clock, FakeEvent(0), Broken(1), 0, recycle=lambda pair: None)
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


class FakeCuda:
    """Torch's streams and events, on the host: each record is over at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = (0, 0, 1)
        self.streams = 0
        self.events = 0
        self.clock_us = 0.0
        cuda = self

        class Stream:
            def __init__(self, device: int, priority: int = 0) -> None:
                cuda.streams += 1
                self.stream_id, self.device_index, self.device_type = cuda.streams, device, 1
                self.waited: list[Event] = []

            def synchronize(self) -> None:
                pass

            def wait_event(self, event: Event) -> None:
                self.waited.append(event)

        class Event(FakeEvent):
            def __init__(self, enable_timing: bool = False) -> None:
                cuda.events += 1
                self.has_time = enable_timing
                self.stream: Stream | None = None
                super().__init__(0.0)

            def record(self, stream: Stream) -> None:
                cuda.clock_us += 1
                self.at_us = cuda.clock_us
                self.stream = stream

            def elapsed_time(self, later: FakeEvent) -> float:
                assert self.has_time
                return super().elapsed_time(later)

            def synchronize(self) -> None:
                pass

        def set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
            self.current = stream_id, device_index, device_type

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch._C, "_cuda_getCurrentStream", lambda _: self.current, raising=False)
        patch.setattr(torch._C, "_cuda_setStream", set_stream, raising=False)
        patch.setattr(cuda_device, "device_info", lambda _: SimpleNamespace(num_sms=132))


def test_work_runs_on_its_lanes_stream(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda(monkeypatch)
    device = CudaDevice(device=0)
    made, seen = cuda.events, []
    work = Work("x", lambda place: seen.append(cuda.current))
    for _ in range(20):
        for lane in LANES:
            event = device.launch(lane, Place.whole(132), work)
            assert cuda.current == (0, 0, 1)
            device.wait([event])
            assert event.query()
            times = event.times_us()
            assert times is not None
            assert times[0] < times[1]
    assert seen == 20 * [(1, 0, 1), (2, 0, 1)]
    # those of each lane's last launch, and of a moment that times are told from, are held
    assert cuda.events - made <= 8
    again = [device.launch("decode", Place.whole(132), work) for _ in range(3)]
    assert len({id(event._pair[1]) for event in again if event._pair}) == 3


class FakePartition:
    """A partition of 32 SMs of GPU 0, with a stream of its own."""

    device, num_sms, closed = 0, 32, False

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream(0)

    def check_open(self) -> None:
        if self.closed:
            raise PartitionError("this partition is closed")


def test_a_partition_is_the_whole_device(monkeypatch: pytest.MonkeyPatch):
    """Both lanes run on its stream, one behind the other, and stop where it is closed."""
    cuda = FakeCuda(monkeypatch)
    partition: Any = FakePartition()
    device = CudaDevice(partition=partition)
    assert (device.index, device.num_sms, device.rungs) == (0, 32, ())
    assert not device.can_share
    place, seen = Place.whole(32), []
    assert device.partition(place) is partition
    for lane in LANES:
        device.launch(lane, place, Work("x", lambda place: seen.append(cuda.current)))
    assert seen == 2 * [(partition.stream.stream_id, 0, 1)]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    device.synchronize()
    partition.closed = True
    for lane in LANES:
        with pytest.raises(PartitionError, match="closed"):
            device.launch(lane, place, Work("x", lambda place: None))
    with pytest.raises(PartitionError, match="closed"):
        CudaDevice(partition=partition)


def test_a_partition_goes_with_no_ladder_and_no_other_gpu(monkeypatch: pytest.MonkeyPatch):
    FakeCuda(monkeypatch)
    partition: Any = FakePartition()
    with pytest.raises(ArgumentError, match="pass one of both"):
        CudaDevice([], partition=partition)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"ladder=\[32\]: pass smkern.ladder"):
        CudaDevice([32])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"ladder=32: pass smkern.ladder"):
        CudaDevice(32)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="device=1, the partition is of GPU 0"):
        CudaDevice(device=1, partition=partition)


def test_what_runs_behind_a_launch(monkeypatch: pytest.MonkeyPatch):
    """On its stream, with an end of its own: the launch is over when it was, and what leaves the
    stream waits for both."""
    cuda, place, seen = FakeCuda(monkeypatch), Place.whole(132), []
    device = CudaDevice(device=0)
    elsewhere = torch.cuda.Stream(0)
    work = Work("x", lambda place: None)
    for lane in LANES:
        device.behind(lane, lambda: seen.append(cuda.current))
        event = device.launch(lane, place, work)
        ended_us = cuda.clock_us
        device.behind(lane, lambda: seen.append(cuda.current))
        assert cuda.current == (0, 0, 1)
        assert event._pair is not None
        assert event._pair[1].at_us == ended_us
        stream, end = device._last[lane]  # type: ignore[misc]
        assert (end.at_us, end.stream) == (cuda.clock_us, stream)
        with monkeypatch.context() as patch:
            patch.setattr(device, "stream", lambda lane, place: elsewhere)
            device.launch(lane, place, work)
        assert elsewhere.waited[-1] is end
    assert seen == [(1, 0, 1), (1, 0, 1), (2, 0, 1), (2, 0, 1)]


def test_what_raises_leaves_the_stream(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda(monkeypatch)
    device = CudaDevice(device=0)

    def fail(*given: Place) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.behind("decode", fail)
    assert cuda.current == (0, 0, 1)
    assert device._last["decode"][1].at_us == cuda.clock_us  # type: ignore[index]
    with pytest.raises(ValueError, match="no"):
        device.launch("prefill", Place.whole(132), Work("x", fail))
    assert cuda.current == (0, 0, 1)
