"""A GPU as two lanes of work: streams, events with times, one clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from smkern.device import device_info, torch_device
from smkern.errors import ArgumentError, DeviceError
from smkern.limits import shown
from smkern.partition import Ladder, Partition
from smkern.runtime.device import Device, Event, Work
from smkern.runtime.host_device import host_us
from smkern.runtime.place import LANES, Lane, Place

DECODE_PRIORITY = -1
"""Priority of the decode lane's stream: below 0 is above prefill's."""
WAIT_US = 5e3
"""A wait returns after so long in any case: the caller looks at the clock, since a GPU may hang."""
ANCHOR_US = 2e6
"""The clock's event is replaced after so long: torch tells a distance in fp32 milliseconds, so one
of a minute is 4 us off, where no times were asked for so long."""
_TRIES = 3


class Clock:
    """The device's events on the host's clock.

    The two drift apart by some parts in a million, so what is certain corrects it: nothing begins
    before it was launched, nor ends after it was seen over.
    """

    def __init__(self, stream: Any) -> None:
        self._at_us, self._event = min(
            (self._anchor(stream) for _ in range(_TRIES)), key=lambda tried: tried[0]
        )[1:]

    def times_us(
        self, begin: Any, end: Any, launched_us: float, seen_us: float
    ) -> tuple[float, float]:
        """When two events were, both over; between what the host knows."""
        begun = self._at_us + 1e3 * self._event.elapsed_time(begin)
        ended = self._at_us + 1e3 * self._event.elapsed_time(end)
        shift = max(launched_us - begun, 0.0) or min(seen_us - ended, 0.0)
        self._at_us += shift
        if ended - self._at_us > ANCHOR_US:
            self._event, self._at_us = end, ended + shift
        return begun + shift, ended + shift

    def keeps(self, event: Any) -> bool:
        """Whether times are told from an event."""
        return event is self._event

    @staticmethod
    def _anchor(stream: Any) -> tuple[float, float, Any]:
        """How long it took to record an event, when that was, and the event."""
        event = torch.cuda.Event(enable_timing=True)
        stream.synchronize()
        before = host_us()
        event.record(stream)
        event.synchronize()
        after = host_us()
        return after - before, (before + after) / 2, event


Pair = tuple[Any, Any]
"""The events before and behind a launch."""


class CudaEvent:
    """The end of a launch, with the times of the launch.

    Args:
        clock: Tells times.
        begin, end: Recorded before and behind the launch.
        launched_us: When it was launched, on the host's clock.
        recycle: Told the two once their times are known: they are not looked at here again.
    """

    __slots__ = ("_clock", "_launched_us", "_pair", "_recycle", "_seen_us", "_times")

    def __init__(
        self,
        clock: Clock,
        begin: Any,
        end: Any,
        launched_us: float,
        recycle: Callable[[Pair], None],
    ) -> None:
        self._clock = clock
        self._pair: Pair | None = (begin, end)
        self._launched_us = launched_us
        self._recycle = recycle
        self._seen_us: float | None = None
        self._times: tuple[float, float] | None = None

    def query(self) -> bool:
        """Whether it is over; never waits.

        Raises:
            DeviceError: the device reported an error, of this launch or of any before.
        """
        if self._seen_us is not None:
            return True
        assert self._pair is not None
        try:
            if not self._pair[1].query():
                return False
        except RuntimeError as error:
            raise DeviceError(
                f"the GPU reported an error while work ran: {error}. What is on it is lost: end "
                "the process, and look for the launch with CUDA_LAUNCH_BLOCKING=1 or "
                "compute-sanitizer"
            ) from error
        self._seen_us = host_us()
        return True

    def times_us(self) -> tuple[float, float] | None:
        """When it began and ended; None: it was not seen over, or the device failed since.

        The first call asks the device, which takes some 6 us: not between a step and the next.
        """
        if self._seen_us is not None and self._pair is not None:
            pair, self._pair = self._pair, None
            with suppress(RuntimeError):
                self._times = self._clock.times_us(*pair, self._launched_us, self._seen_us)
                self._recycle(pair)
        return self._times


class CudaDevice(Device):
    """A GPU's two lanes: work of a lane runs in order, wherever each of it runs.

    The decode lane is one ordinary stream of high priority: decode graphs run on the partition of
    their capture, whatever stream launches them, and other work of the lane has the whole device.
    The prefill lane is the stream of its partition, or an ordinary one for the whole device; the
    stream that it moves to waits, on the device, for what it has launched.

    Args:
        ladder: The splits; they stay open as long as anything runs. None: the whole device alone.
        device: Index of the GPU. None: the ladder's or the partition's, or torch's current one.
        partition: What counts as the whole device: both lanes share its stream. There are no
            splits of it.

    Attributes:
        num_sms: SMs of the device, or of the partition.
        rungs: Rungs of the ladder.
        index: GPU index.

    Raises:
        DeviceError: no GPU.
        ArgumentError: a ladder and a partition, or a device that is not theirs.

    Example:
        >>> with smkern.ladder([16, 32]) as ladder:                            # doctest: +SKIP
        ...     lanes = Interleaver(CudaDevice(ladder))
    """

    def __init__(
        self,
        ladder: Ladder | None = None,
        device: int | None = None,
        *,
        partition: Partition | None = None,
    ) -> None:
        if ladder is not None and partition is not None:
            raise ArgumentError(
                f"a ladder and partition={partition!r}: a partition is not split; pass one of both"
            )
        splits: list[Any] = [] if ladder is None else [ladder]
        if isinstance(ladder, Iterable):
            splits = list(ladder)
        if not all(hasattr(split, "decode") for split in splits):
            raise ArgumentError(f"ladder={shown(ladder)}: pass smkern.ladder([16, 32]), or None")
        sides = [split.decode for split in splits] if partition is None else [partition]
        if device is None:
            device = sides[0].device if sides else torch_device("cuda").index
        elif sides and sides[0].device != device:
            what = "ladder" if partition is None else "partition"
            raise ArgumentError(
                f"device={device}, the {what} is of GPU {sides[0].device}: make a {what} there, "
                "or leave device at None"
            )
        self.index = device
        self._whole = partition
        self.can_share = partition is None  # else both lanes are one stream
        self._splits = {split.decode.num_sms: split for split in splits}
        self.rungs = tuple(sorted(self._splits))
        if partition is None:
            self.num_sms = device_info(device).num_sms
            self._decode = torch.cuda.Stream(device, priority=DECODE_PRIORITY)
            self._prefill = torch.cuda.Stream(device)
        else:
            partition.check_open()
            self.num_sms = partition.num_sms
            self._decode = self._prefill = partition.stream
        # each lane's stream and the event behind all of it
        self._last: dict[Lane, tuple[Any, Any] | None] = dict.fromkeys(LANES)
        # of what runs behind a launch, which has an end of its own
        self._behind = {lane: torch.cuda.Event() for lane in LANES}
        self._clock = Clock(self._decode)
        # events that are no longer looked at: making two and destroying them takes some 8 us
        self._spare: list[Pair] = []
        self._held: list[Pair] = []

    def now_us(self) -> float:
        return host_us()

    def partition(self, place: Place) -> Partition | None:
        """The partition of a place; None: the whole device."""
        if place.side == "whole":
            return self._whole
        split = self._splits[place.rung]
        return split.decode if place.side == "decode" else split.prefill

    def stream(self, lane: Lane, place: Place) -> Any:
        """The stream that a lane launches on at a place."""
        if self._whole is not None:
            self._whole.check_open()
        if lane == "decode":
            return self._decode
        partition = self.partition(place)
        if partition is None:
            return self._prefill
        partition.check_open()
        return partition.stream

    def launch(self, lane: Lane, place: Place, work: Work) -> CudaEvent:
        stream = self.stream(lane, place)
        last = self._last[lane]
        if last is not None and last[0] is not stream:
            stream.wait_event(last[1])
        begin, end = self._spare.pop() if self._spare else _new_pair()
        # torch's own functions for this make a stream and take some microseconds each
        before = torch._C._cuda_getCurrentStream(self.index)
        wanted = stream.stream_id, stream.device_index, stream.device_type
        launched_us = host_us()
        if before != wanted:
            _set_stream(wanted)
        try:
            begin.record(stream)
            work.run(place)
        except BaseException:
            # the lane goes on behind what was launched before it raised, if the GPU lives
            with suppress(RuntimeError):
                end.record(stream)
                self._last[lane] = stream, end
            raise
        finally:
            if before != wanted:
                _set_stream(before)
        end.record(stream)
        self._last[lane] = stream, end
        return CudaEvent(self._clock, begin, end, launched_us, self._recycle)

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        """Run something on the stream of a lane's last launch, behind it.

        The end of that launch stays where it is; a stream that the lane moves to waits for this.
        """
        last, end = self._last[lane], self._behind[lane]
        stream = self.stream(lane, Place.whole(self.num_sms)) if last is None else last[0]
        before = torch._C._cuda_getCurrentStream(self.index)
        _set_stream((stream.stream_id, stream.device_index, stream.device_type))
        try:
            run()
        finally:
            _set_stream(before)
            with suppress(RuntimeError):  # as behind a launch that raised
                end.record(stream)
                self._last[lane] = stream, end

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        """Until one of the events may be over, or until a moment; for a few ms at most.

        While work is on its way this looks again and again: the shortest sleep takes some 60 us by
        the timer's slack, and the caches of the core that slept are cold afterwards, which doubles
        what the next step takes. Other threads run in between.
        """
        end_us = host_us() + WAIT_US
        if until_us is not None:
            end_us = min(end_us, until_us)
        if not events:
            time.sleep(max(end_us - host_us(), 0) / 1e6)
            return
        # an error counts as over: a poll raises it, where it is handled
        with suppress(DeviceError):
            while not any(event.query() for event in events) and host_us() < end_us:
                os.sched_yield()

    def synchronize(self) -> None:
        """Wait for all work of both lanes, then of the device.

        The device's own wait may end before a graph of a partition does, so each stream is waited
        for as well.
        """
        for last in self._last.values():
            if last is not None:
                last[1].synchronize()
        whole = () if self._whole is None else (self._whole,)
        for sides in (*self._splits.values(), whole):
            for side in sides:
                if not side.closed:
                    side.stream.synchronize()
        torch.cuda.synchronize(self.index)

    def _recycle(self, pair: Pair) -> None:
        """Record two events anew some time, once nothing else means their moments."""
        held, self._held = [*self._held, pair], []
        lasts = [last[1] for last in self._last.values() if last is not None]
        for pair in held:
            kept = any(last is pair[1] for last in lasts) or self._clock.keeps(pair[1])
            (self._held if kept else self._spare).append(pair)


def _new_pair() -> Pair:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _set_stream(stream: tuple[int, int, int]) -> None:
    """Make a stream torch's current one, by its id, device and kind of device."""
    id_, index, kind = stream
    torch._C._cuda_setStream(stream_id=id_, device_index=index, device_type=kind)
