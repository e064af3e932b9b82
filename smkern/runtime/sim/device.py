"""A device that is not there: lanes, events and contention on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from smkern.errors import ArgumentError, DeviceError, StalledError
from smkern.latency.predictor import Predictor
from smkern.latency.ring import Ring
from smkern.limits import as_int, shown
from smkern.runtime.device import Device, Event, Work
from smkern.runtime.place import LANES, Lane, Place
from smkern.runtime.sim.event import FAULTS, Fault, Queued, SimEvent
from smkern.runtime.sim.options import as_part, as_rungs, check_costs

HANGING_WAIT_US = 100_000.0
"""How long a wait takes where nothing ends."""


class SimDevice(Device):
    """Two lanes of work on a virtual clock that only launches and waiting move; deterministic.

    A lane's first launch runs; alone it takes `predictor.alone_us`, and while the other lane's
    first launch runs, `predictor.slowdown` times longer. Where both hold the same SMs (a switch
    that does not wait), each has half of what is shared. Work without a size takes
    `about["us"]`. `work.run` is called as on any device; it may do nothing.

    Args:
        num_sms: SMs of the device.
        rungs: SMs of the decode side of each split, ascending.
        predictor: How long work takes.
        decode_launch_us: Host time from the end of a decode step to the next one's launch: poll,
            decision, launch. The device idles for it where no step is queued; on an H200 some 20.
        decode_gap_us: Device time between two queued decode steps; on an H200 some 8.
        prefill_launch_us: Host time to launch a layer, of work that is more than one launch. Layers
            run as they are launched, so slow launches leave the device idle, as a real host's do.
        tp: Where GPUs share a model, this is one of them: what their sums add to a launch, and
            `predictor` prices its part. None: it has all of the model.
        faults: Launch numbers to faults; see `fail_at`.

    Attributes:
        num_sms, rungs, decode_gap_us: As given.
        predictor: As given, with the sums of `tp`.
        launches: Launches so far; the number of the next.
        launching: The event of the launch whose `run` is being called, else None.
        lost_by: The launch that took the device, if any.
        overlap_us: Time for which both lanes ran on the same SMs.
        has_failed: Whether a launch hangs, or took the device.

    Raises:
        ArgumentError: rungs or times that cannot be.

    Example:
        >>> from smkern.runtime.device import Work
        >>> from smkern.runtime.interleaver import Interleaver
        >>> device = SimDevice(132, (32, 64))
        >>> lanes = Interleaver(device)
        >>> lanes.aim(64)
        >>> step = lanes.launch("decode", Work("decode", lambda place: None, about={"us": 10.0}))
        >>> for _ in range(2):
        ...     _ = lanes.launch("prefill", Work("layer", lambda place: None, about={"us": 7.0}))
        >>> lanes.wait(), device.now_us(), [ticket.work.name for ticket in lanes.poll()]
        (None, 7.0, ['layer'])
        >>> _ = lanes.drain()
        >>> device.now_us(), step.event.times_us()
        (14.0, (0.0, 10.0))
    """

    def __init__(
        self,
        num_sms: int,
        rungs: Sequence[int] = (),
        predictor: Predictor | None = None,
        *,
        decode_launch_us: float = 0.0,
        prefill_launch_us: float = 0.0,
        decode_gap_us: float = 0.0,
        tp: Ring | None = None,
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        num_sms = as_int("num_sms", num_sms, 1)
        self.rungs = as_rungs(rungs, num_sms)
        check_costs(
            {
                "decode_launch_us": decode_launch_us, "prefill_launch_us": prefill_launch_us,
                "decode_gap_us": decode_gap_us,
            }
        )  # fmt: skip
        self.num_sms = num_sms
        self.predictor = as_part(predictor, tp)
        self.launches = 0
        self.launching: SimEvent | None = None
        self.lost_by: int | None = None
        self.overlap_us = 0.0
        self.has_failed = False
        self._decode_launch_us = decode_launch_us
        self._prefill_launch_us = prefill_launch_us
        self.decode_gap_us = decode_gap_us
        self._faults: dict[int, Fault] = {}
        self._now = 0.0
        self._lanes: dict[Lane, deque[Queued]] = {lane: deque() for lane in LANES}
        self._places: dict[tuple[Lane, int], Place] = {}
        self._pair: tuple[Queued, Queued, list[float]] | None = None
        if faults is not None and not isinstance(faults, Mapping):
            raise ArgumentError(f"faults={shown(faults)}: give a fault by number of its launch")
        for number, fault in (faults or {}).items():
            self.fail_at(number, fault)

    def fail_at(self, number: int, fault: Fault) -> None:
        """Make a launch fail, by its number: `device.launches` is the next one's.

        Raises:
            ArgumentError: a launch that was made already, or an unknown fault.
        """
        if fault not in FAULTS:
            raise ArgumentError(f"fault={shown(fault)}: there is {list(FAULTS)}")
        if number < self.launches:
            raise ArgumentError(
                f"launch {number} was made already: give a number of at least {self.launches}"
            )
        self._faults[number] = fault

    def now_us(self) -> float:
        """The clock, of host and device alike."""
        return self._now

    def check_alive(self) -> None:
        """Raise DeviceError where a fault that was asked for took the device."""
        if self.lost_by is not None:
            raise DeviceError(
                f"the simulated device is lost since launch {self.lost_by} (a fault that was "
                "asked for): nothing runs on it any more; make another"
            )

    def progress(self, event: Event) -> float:
        """The part of a launch that is done, from 0 to 1."""
        for queue in self._lanes.values():
            for item in queue:
                if item.event is event:
                    return item.done_us / item.alone_us if item.alone_us else 0.0
        return 1.0

    def spend(self, us: float) -> None:
        """Let the host do something else for so long."""
        self._advance(self._now + us)

    def is_idle(self) -> bool:
        """Whether nothing is queued."""
        return not any(self._lanes.values())

    def launch(self, lane: Lane, place: Place, work: Work) -> SimEvent:
        """Launch behind the lane's earlier work; takes the host's time.

        Raises:
            ArgumentError: a place that is not this device's or not this lane's, or work whose time
                is not known; nothing was launched.
            RuntimeError: a fault that was asked for.
            DeviceError: the device is lost.
        """
        self.check_alive()
        self._check_place(lane, place)
        alone_us = self._alone_us(work, place)
        if lane == "decode":
            alone_us += self.decode_gap_us
        number, self.launches = self.launches, self.launches + 1
        fault = self._faults.pop(number, None)
        if fault == "raise":
            raise RuntimeError(f"launch {number}, {work.name!r}, raised (a fault asked for)")
        event = self.launching = SimEvent(self, number, lane, fault)
        try:
            work.run(place)
        except BaseException:
            event.is_gone = True  # nothing of it runs
            raise
        finally:
            self.launching = None
        self.has_failed |= fault == "hang"
        item = Queued(event, place, work.size, alone_us)
        self._lanes[lane].append(item)
        self._spend_launching(item, work.launches > 1)
        return event

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        """Run something behind a lane's launches, at no cost: it is called as their `run` was.

        Raises:
            DeviceError: the device is lost.
        """
        self.check_alive()
        run()

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        """Move the clock to the end of one of the events, or to a moment.

        Where nothing ends, since a launch hangs, and no moment is given, the clock moves on by
        `HANGING_WAIT_US`, so that a caller that waits again and again sees time go by.

        Raises:
            StalledError: nothing is launched, and no moment was given: on a GPU this waits for
                ever.
        """
        waited = [event for event in events if isinstance(event, SimEvent)]
        if not all(event.is_pending for event in waited) or (waited and self.lost_by is not None):
            return
        # a moment that has passed, as a request's that came during a launch, moves no clock back
        end_us = inf if until_us is None else max(until_us, self._now)
        if self._advance(end_us, events) or until_us is not None:
            return
        if self.lost_by is not None:
            return
        if self.is_idle():
            raise StalledError(
                f"nothing is launched on the simulated device, and it waits for {list(events)} "
                f"from {self._now} us on: give until_us, or launch something"
            )
        self._now += HANGING_WAIT_US

    def _check_place(self, lane: Lane, place: Place) -> None:
        if self._places.get((lane, place.rung)) == place:
            return
        rung = None if place.side == "whole" else place.rung
        if (rung is not None and rung not in self.rungs) or place != Place.of(
            lane, rung, self.num_sms
        ):
            raise ArgumentError(
                f"{place} on the {lane} lane: this device has {self.num_sms} SMs and the rungs "
                f"{list(self.rungs)}; a lane runs on its own side of one, or on all"
            )
        self._places[lane, place.rung] = place

    def _alone_us(self, work: Work, place: Place) -> float:
        alone_us: Any
        if work.size is not None and self.predictor is not None:
            alone_us = self.predictor.alone_us(work.size, place.num_sms)
        else:
            alone_us = (work.about or {}).get("us")
        try:
            if 0 <= alone_us < inf:
                return alone_us  # type: ignore[no-any-return]
        except TypeError:  # none is given, or what is no number
            pass
        raise ArgumentError(
            f"{work.name!r} takes {shown(alone_us)} us: give a size and the device a predictor, or "
            'about={"us": ...}, a finite time of at least 0'
        )

    def _spend_launching(self, item: Queued, by_layers: bool) -> None:
        layers = item.size.layers if item.size is not None and by_layers else 0
        cost = self._prefill_launch_us if layers else self._decode_launch_us
        if cost and layers > 1 and item.event.fault is None and self._is_alone(item):
            item.event.began_us = self._now + cost
            # each layer is launched while the one before it runs, or after it
            item.done_us = (layers - 1) * min(cost, item.alone_us / layers)
            self._now += layers * cost
        elif cost:
            for layer in range(1, layers):
                self._advance(self._now + cost)
                item.launched_us = item.alone_us * layer / layers
            self._advance(self._now + cost)
        item.launched_us = item.alone_us
        item.is_launched = True

    def _is_alone(self, item: Queued) -> bool:
        return self.lost_by is None and all(
            not queue or (len(queue) == 1 and queue[0] is item) for queue in self._lanes.values()
        )

    def _advance(self, until_us: float, watched: Sequence[Event] = ()) -> bool:
        """Move the clock to a moment, or to the end of a watched event; whether that came."""
        while True:
            if any(event in watched for event in self._end_heads()):
                return True
            if self.lost_by is not None and until_us == inf:
                return False
            running = self._running()
            ends = [
                self._now + item.left_us * slow if slow < inf else inf for item, slow in running
            ]
            moment = min(ends, default=inf)
            if moment > until_us or moment == inf:
                break
            self._run(running, moment - self._now)
            for (item, _), end in zip(running, ends, strict=True):
                if end <= moment:
                    item.done_us = item.launched_us  # exactly, whatever the sums rounded to
            self._now = moment
        if until_us < inf:
            self._run(running, until_us - self._now)
            self._now = until_us
        return False

    def _end_heads(self) -> list[SimEvent]:
        over: list[SimEvent] = []
        if self.lost_by is not None:
            return over
        for queue in self._lanes.values():
            while queue and self._begin(queue[0]) and queue[0].is_over:
                event = queue.popleft().event
                event.ended_us = self._now
                over.append(event)
                if event.fault == "lost":
                    self.lost_by, self.has_failed = event.number, True
                    return over
        return over

    def _begin(self, item: Queued) -> bool:
        """Whether some of an item is launched; it begins then."""
        if not item.is_launched and item.launched_us == 0:
            return False
        if item.event.began_us is None:
            item.event.began_us = self._now
        return True

    def _running(self) -> list[tuple[Queued, float]]:
        """What runs now, and how many times longer it takes than alone."""
        if self.lost_by is not None:
            return []
        heads = [queue[0] for queue in self._lanes.values() if queue]
        running = [head for head in heads if head.event.fault == "hang" or head.is_busy]
        if len(running) < 2:
            return [(item, inf if item.event.fault == "hang" else 1.0) for item in running]
        return list(zip(running, self._slowdowns(*running), strict=True))

    def _slowdowns(self, one: Queued, other: Queued) -> list[float]:
        if self._pair is None or self._pair[0] is not one or self._pair[1] is not other:
            slow = [self._slowdown(one, other), self._slowdown(other, one)]
            self._pair = one, other, slow
        return self._pair[2]

    def _slowdown(self, item: Queued, beside: Queued) -> float:
        if item.event.fault == "hang":
            return inf
        num_sms, beside_sms, shared = item.place.num_sms, beside.place.num_sms, 1.0
        if item.place.overlaps(beside.place):
            both = min(num_sms + beside_sms - self.num_sms, self.num_sms)
            same_side = item.place.side == beside.place.side
            both = min(num_sms, beside_sms) if same_side else both
            shared = num_sms / (num_sms - both / 2)
            # Beside each other they are what a split that gives each its half would be.
            num_sms, beside_sms = num_sms - both // 2, beside_sms - both // 2
        if item.size is None or beside.size is None or self.predictor is None:
            return shared
        slow = self.predictor.slowdown(item.size, num_sms, beside.size, beside_sms)
        return max(slow, 1.0) * shared

    def _run(self, running: list[tuple[Queued, float]], us: float) -> None:
        """Let time go by in which nothing ends."""
        for item, slow in running:
            item.done_us = min(item.done_us + us / slow, item.launched_us)
        if len(running) == 2 and running[0][0].place.overlaps(running[1][0].place):
            self.overlap_us += us
