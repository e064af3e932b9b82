"""Lanes kept busy with the same work over and over, and how long each turn took."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from smkern.runtime.device import Device, Event, Work
from smkern.runtime.place import Lane, Place

MAX_SECONDS = 3.0
"""A measurement ends after so long, however few turns it saw, but not before two."""


@dataclass(slots=True)
class Turns:
    """A lane that does the same works again and again.

    Attributes:
        lane: The lane.
        place: Where its works run.
        works: One turn, in order.
        depth: Works that are kept queued.
        ends_us: When each turn ended, on the device's clock.
    """

    lane: Lane
    place: Place
    works: Sequence[Work]
    depth: int = 2
    ends_us: list[float] = field(default_factory=list)
    _queued: deque[tuple[bool, Event]] = field(default_factory=deque)
    _next: int = 0

    @property
    def oldest(self) -> Event | None:
        """The event of the oldest work that was not seen over."""
        return self._queued[0][1] if self._queued else None

    def top_up(self, device: Device) -> None:
        """Launch until `depth` works are queued."""
        while len(self._queued) < self.depth:
            work = self.works[self._next]
            self._next = (self._next + 1) % len(self.works)
            event = device.launch(self.lane, self.place, work)
            self._queued.append((self._next == 0, event))

    def collect(self) -> None:
        """Note which works are over."""
        while self._queued and self._queued[0][1].query():
            is_last, event = self._queued.popleft()
            times = event.times_us()
            if is_last and times is not None:
                self.ends_us.append(times[1])

    def drain(self, device: Device) -> None:
        """Wait for what is queued."""
        while self._queued:
            device.wait([self._queued[0][1]])
            self.collect()

    def periods_us(self, begin_us: float, end_us: float) -> list[float]:
        """From one turn's end to the next's, of turns that ended within a time."""
        inside = [end for end in self.ends_us if begin_us <= end <= end_us]
        return [after - before for before, after in pairwise(inside)]


@dataclass(frozen=True, slots=True)
class Steady:
    """What a lane's turns took in the steady state.

    Attributes:
        us: Median.
        worst_us: The longest.
        turns: How many.
    """

    us: float
    worst_us: float
    turns: int


def measure(
    device: Device,
    lanes: Sequence[Turns],
    *,
    settle_s: float,
    seconds: float,
    turns: int,
    while_busy: Callable[[], None] = lambda: None,
    watch: Callable[[], None] = lambda: None,
) -> list[Steady]:
    """Keep lanes busy, let clocks settle, then time turns.

    Args:
        device: What they run on.
        lanes: The lanes; each has work queued all the time.
        settle_s: Seconds before the first turn that counts.
        seconds: Seconds of turns that count, at least.
        turns: Turns of each lane that count, at least, within `MAX_SECONDS`.
        while_busy: Called once, in the middle.
        watch: Called again and again while turns count.

    Returns:
        One of each lane.
    """
    began = device.now_us()
    settled = began + 1e6 * settle_s
    least = settled + 1e6 * seconds
    most = settled + 1e6 * MAX_SECONDS
    looked = False
    while True:
        for lane in lanes:
            lane.top_up(device)
        events = [lane.oldest for lane in lanes if lane.oldest is not None]
        device.wait(events)
        for lane in lanes:
            lane.collect()
        now = device.now_us()
        if now > settled:
            if not looked:
                looked = True
                while_busy()
            watch()
        seen = min(len(lane.periods_us(settled, now)) for lane in lanes)
        if now > least and (seen >= turns or (now > most and seen >= 2)):
            break
    stopped = device.now_us()
    for lane in lanes:
        lane.drain(device)
    return [_steady(lane.periods_us(settled, stopped)) for lane in lanes]


def _steady(periods: Sequence[float]) -> Steady:
    return Steady(statistics.median(periods), max(periods), len(periods))
