"""Two lanes of work on the SMs of one device: which may launch where, and what is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from smkern.errors import ArgumentError, DeviceError, StalledError
from smkern.garbage import collect_young
from smkern.limits import as_flag, as_int, shown
from smkern.runtime.device import (
    Device,
    Event,
    NoAnswerError,
    Work,
    as_device_error,
    check_launch,
    is_over,
    no_bool,
)
from smkern.runtime.place import LANES, Lane, Place
from smkern.runtime.ticket import Ticket

MAX_QUEUED_LAUNCHES = 960
"""Kernels of a lane that may wait on the device: the driver blocks the caller near 1024."""
ROOM_US = 1000.0
"""Between two looks whether a long forward has made room for work that found the queue full."""

_FENCE = Work("fence", lambda place: None, launches=0, about={"us": 0.0})


Watch = Callable[[Ticket], None]
Kept = TypeVar("Kept")


class _ByLane(dict[Lane, Kept]):
    """What is kept of each lane; ArgumentError for one that there is not."""

    def __missing__(self, lane: object) -> Kept:
        check_launch(lane, _FENCE)
        raise KeyError(lane)


class Interleaver:
    """Launches two lanes of work side by side, each on its SMs, and polls what is over.

    An engine that keeps its own scheduler and cache drives this alone, with callables. It knows
    nothing of models: work is whatever launches kernels on the current stream.

    Each lane runs at a place: its side of a rung, or the whole device. `aim` says where the lanes
    shall run; the side that shrinks moves with its next launch, the side that grows once the other
    lane's work that overlaps its new SMs is over, and stays on its old ones until then. So nothing
    overlaps and nothing drains. With `impatient` the growing side moves at once, and overlaps at
    most what the other lane has queued. Lanes that are aimed at overlapping places take turns
    there, unless they are told to share them.

    Args:
        device: Lanes, events, clock.
        impatient: Whether a growing side moves at once.
        max_queued: Kernels of a lane that may wait on the device.
        on_launch: Told every launch.
        on_over: Told every launch that a `poll` saw over.

    Attributes:
        device: As given.
        shared: Whether the lanes run at once where their places overlap.
        failed: The launch about which the device reported an error, when a `poll` raised.

    Source: MuxWise section 3.2.3, DRIFT section 3.3: layer-wise prefill, events that are polled.

    Example:
        >>> with smkern.ladder([16, 32]) as ladder:                            # doctest: +SKIP
        ...     lanes = Interleaver(CudaDevice(ladder))
        ...     lanes.aim(32)
        ...     step = lanes.launch("decode", Work("decode", lambda place: graph.replay()))
        ...     lanes.launch("prefill", Work("prefill", lambda place: layer(0)))
        ...     while not step.is_over:
        ...         lanes.wait()
        ...         lanes.poll()
    """

    def __init__(
        self,
        device: Device,
        *,
        impatient: bool = False,
        max_queued: int = MAX_QUEUED_LAUNCHES,
        on_launch: Watch | None = None,
        on_over: Watch | None = None,
    ) -> None:
        if not hasattr(device, "now_us"):
            raise ArgumentError(f"device={shown(device)}: pass a CudaDevice(ladder) or a SimDevice")
        self.device = device
        self._impatient = as_flag("impatient", impatient)
        self._max_queued = as_int("max_queued", max_queued, 1)
        self._on_launch = on_launch
        self._on_over = on_over
        self._places: dict[tuple[Lane, int | None], Place] = {}
        whole = Place.whole(device.num_sms)
        self._target: _ByLane[Place] = _ByLane(dict.fromkeys(LANES, whole))
        self._place: _ByLane[Place] = _ByLane(dict.fromkeys(LANES, whole))
        self._aimed: tuple[int | None, int | None] = None, None
        self._can_share = getattr(device, "can_share", True)
        self.shared = False
        self._queued: _ByLane[deque[Ticket]] = _ByLane((lane, deque()) for lane in LANES)
        self._launches: dict[Lane, int] = dict.fromkeys(LANES, 0)
        # Work that found no room, and may find some before the lane's first is over.
        self._refused: dict[Lane, Work] = {}
        self._count = 0
        # What the device reported while a poll had something to return.
        self._error: DeviceError | None = None
        self.failed: Ticket | None = None

    def aim(self, rung: int | None, *, prefill: int | None = -1, shared: bool = False) -> None:
        """Say where the lanes shall run from now on; launches nothing and waits for nothing.

        Args:
            rung: SMs of the decode side. None: the whole device.
            prefill: The rung whose complement the prefill lane takes, where it differs from
                `rung`. None: the whole device. -1: `rung`.
            shared: Whether the lanes run at once where their places overlap, on a device that
                can; else one after another.

        Raises:
            ArgumentError: a rung that the device does not have.
        """
        if type(prefill) is int and prefill == -1:
            prefill = rung
        for asked in (rung, prefill):
            if asked is not None and not (type(asked) is int and asked in self.device.rungs):
                raise ArgumentError(
                    f"rung={shown(asked)}: this device has the rungs {list(self.device.rungs)}; "
                    "take one of them, or None for the whole device"
                )
        self.shared = shared and self._can_share
        if self._aimed == (rung, prefill):
            return
        self._target["decode"] = self._place_of("decode", rung)
        self._target["prefill"] = self._place_of("prefill", prefill)
        self._aimed = rung, prefill

    def target(self, lane: Lane) -> Place:
        """Where a lane shall run; raises as `queued`."""
        return self._target[lane]

    def place_for(self, lane: Lane) -> Place | None:
        """Where the lane's next launch would run; None: it must wait for the other lane. Raises as
        `queued`."""
        queue = self._queued["prefill" if lane == "decode" else "decode"]
        target, place = self._target[lane], self._place[lane]
        if not queue or self.shared:
            return target
        if self._impatient and "whole" not in [target.side, *[x.place.side for x in queue]]:
            return target
        for found in (target, place):
            for ticket in queue:
                if found.overlaps(ticket.place):
                    break
            else:
                return found
        return None

    def can_launch(self, lane: Lane, work: Work | None = None) -> bool:
        """Whether the lane has SMs now, and room in its queue.

        Raises:
            ArgumentError: no such lane, or no `Work`.
        """
        try:
            return self._has_room(lane, work) and self.place_for(lane) is not None
        except (AttributeError, KeyError, TypeError):
            check_launch(lane, _FENCE if work is None else work)
            raise

    def queued(self, lane: Lane) -> int:
        """Launches of a lane that no `poll` has seen over; ArgumentError for no such lane."""
        return len(self._queued[lane])

    def tickets(self, lane: Lane) -> tuple[Ticket, ...]:
        """Launches of a lane that no `poll` has seen over, in order; raises as `queued`."""
        return tuple(self._queued[lane])

    def skipped(self, count: int) -> None:
        """So many launches were made and over without this."""
        self._count += count

    def launch(self, lane: Lane, work: Work) -> Ticket:
        """Launch work where the lane runs now.

        What it raises is raised. Part of it may be on the device by then, so its SMs, and whatever
        else the lanes take turns with, stay the lane's until a poll finds that over.

        Raises:
            StalledError: the lane must wait for the other, or its queue is full (`can_launch`).
            ArgumentError: no such lane, or no `Work`.
        """
        try:
            ticket = self.try_launch(lane, work)
        except (AttributeError, KeyError, TypeError):
            check_launch(lane, work)
            raise
        if ticket is None:
            raise StalledError(
                f"{work.name!r} cannot be launched on the {lane} lane now: "
                f"{self._launches[lane]} of {self._max_queued} launches queued, SMs "
                f"{'free' if self.place_for(lane) else 'held by the other lane'}; ask can_launch() "
                "first, poll and try again"
            )
        return ticket

    def try_launch(self, lane: Lane, work: Work) -> Ticket | None:
        """As `launch`; None, with nothing launched, where `can_launch` would say no."""
        self._refused.pop(lane, None)
        if not self._has_room(lane, work):
            if self._queued[lane][0].work.left is not None:
                self._refused[lane] = work
            return None
        place = self.place_for(lane)
        if place is None:
            return None
        launched_us = self.device.now_us()
        try:
            event = self.device.launch(lane, place, work)
            _ = event.query  # what is no event is found here, not while it is waited for
        except BaseException:
            self._place[lane] = place
            self._keep_place(lane)
            raise
        host_us = self.device.now_us() - launched_us
        ticket = Ticket(self._count, lane, place, work, launched_us, event, host_us)
        self._count += 1
        self._place[lane] = place
        self._queued[lane].append(ticket)
        self._launches[lane] += work.launches
        if self._on_launch is not None:
            self._on_launch(ticket)
        return ticket

    def fence(self, lane: Lane) -> Event:
        """An event behind all of a lane's launches, also of one that raised midway."""
        return self.device.launch(lane, self._place[lane], _FENCE)

    def poll(self) -> list[Ticket]:
        """What is over since the last poll, each lane in order, decode first; never waits.

        Raises:
            DeviceError: the device reported an error when it was asked about `failed`. Launches
                stay queued, and it is raised again, until some are abandoned; what was over before
                is returned first.
        """
        if self._error is not None:
            raise self._error
        over: list[Ticket] = []
        for lane in LANES:
            queue = self._queued[lane]
            while queue:
                self.failed = head = queue[0]
                try:
                    if head.error is not None:
                        raise head.error
                    answer = head.event.query()  # as `is_over`, without a call of it
                except Exception as reason:  # noqa: BLE001  raised as the device's
                    return self._not_asked(as_device_error(reason), over)
                if answer is False:
                    break
                if answer is not True:
                    return self._not_asked(no_bool(answer), over)
                ended = self._end(queue.popleft())
                if ended.work is not _FENCE:
                    over.append(ended)
        self.failed = None
        return over

    def _not_asked(self, error: DeviceError, over: list[Ticket]) -> list[Ticket]:
        """What a poll returns behind an error, which the next one raises if this is something."""
        self._error = error
        if not over:
            raise error
        return over

    def wait(self, until_us: float | None = None) -> None:
        """Let time go by until something may be over, or until a moment."""
        collect_young()
        events = [queue[0].event for queue in self._queued.values() if queue]
        if self._refused:
            soon_us = self.device.now_us() + ROOM_US
            until_us = soon_us if until_us is None else min(until_us, soon_us)
        self.device.wait(events, until_us)

    def has_room_again(self) -> bool:
        """Whether a lane could take the work now that it last refused for want of room; told
        once."""
        for lane, work in self._refused.items():
            if self.can_launch(lane, work):
                self._refused.clear()
                return True
        return False

    def drain(self) -> list[Ticket]:
        """Wait until nothing is queued; what was over."""
        over = self.poll()
        while any(self._queued.values()):
            self.wait()
            over += self.poll()
        return over

    def abandon(self, ticket: Ticket | None = None) -> list[Ticket]:
        """Forget what is queued, after an error of the device; what it was.

        Args:
            ticket: The launch that failed, where the others go on. None: all.
        """
        tickets = [ticket for lane in LANES for ticket in self._queued[lane]]
        left = [x for x in tickets if ticket in (None, x)]
        may_run = isinstance(self._error, NoAnswerError)
        self._error = self.failed = None
        self._refused.clear()
        for gone in left:  # a holder of one must not ask the device again
            gone.seen_us = self.device.now_us()
            if may_run:
                with suppress(Exception):
                    gone.fence = self.fence(gone.lane)
            self._queued[gone.lane].remove(gone)
            self._launches[gone.lane] -= gone.work.launches
        if ticket is not None and ticket.work is not _FENCE:  # the device may run it all the same
            self._keep_place(ticket.lane)
        return [gone for gone in left if gone.work is not _FENCE]

    def _keep_place(self, lane: Lane) -> None:
        """A launch raised: the lane is not free before what it has put on the device is over."""
        with suppress(Exception):  # a device that takes nothing more runs nothing either
            event = self.fence(lane)
            if not is_over(event):
                now_us = self.device.now_us()
                ticket = Ticket(-1, lane, self._place[lane], _FENCE, now_us, event)
                self._queued[lane].append(ticket)

    def _has_room(self, lane: Lane, work: Work | None) -> bool:
        queue = self._queued[lane]
        launches = self._launches[lane] + (1 if work is None else work.launches)
        if not queue or launches <= self._max_queued:
            return True
        left = queue[0].work.left
        if left is None:
            return False
        launches -= queue[0].work.launches
        try:
            return bool(launches + left(queue[0].event) <= self._max_queued)
        except Exception:  # noqa: BLE001  not known: as if all were
            return False

    def _place_of(self, lane: Lane, rung: int | None) -> Place:
        """The one object for a lane's side of a rung: asked for in every step."""
        place = self._places.get((lane, rung))
        if place is None:
            place = self._places[lane, rung] = Place.of(lane, rung, self.device.num_sms)
        return place

    def _end(self, ticket: Ticket) -> Ticket:
        self._launches[ticket.lane] -= ticket.work.launches
        self._refused.pop(ticket.lane, None)
        ticket.seen_us = self.device.now_us()
        if self._on_over is not None and ticket.work is not _FENCE:
            self._on_over(ticket)
        return ticket
