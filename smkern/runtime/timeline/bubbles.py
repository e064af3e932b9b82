"""Bubbles: time in which a lane ran nothing, and whether there was something to run.

    bubble ratio of a lane  = time with no kernel while work for it existed
                              / time while work for it existed
    MuxWise's of a lane     = time with no kernel / window
    of both                 = the mean over the lanes that ran something

The window goes from the first begin to the last end of a launch of either lane. Work for a lane
exists while it runs something, from when a launch is made until it ends, and while
`State.has_work` says so. A launch counts as running from its begin to its end: gaps between the
kernels of one launch are not seen.

Source: MuxWise section 4.4.2 (the second ratio; there of the two streams, profiled).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from smkern.runtime.place import LANES, Lane
from smkern.runtime.timeline.trace import Reader, Span, State, Trace

CHANGES = 4096
"""Changes of what there is to do that a lane remembers while it launches nothing."""

Stretch = tuple[float, float]
"""From a time to a time, us."""


class Gap(NamedTuple):
    """Time in which a lane ran nothing, between two launches.

    Attributes:
        lane: Which.
        begin_us, end_us: From one launch's end to the next one's begin.
        bubbles: Stretches of it in which work for the lane existed.
    """

    lane: Lane
    begin_us: float
    end_us: float
    bubbles: tuple[Stretch, ...]

    @property
    def bubble_us(self) -> float:
        """Time in which work for the lane existed."""
        return _total(self.bubbles)


@dataclass(frozen=True, slots=True)
class LaneBubbles:
    """How a lane's time was spent, in microseconds.

    Attributes:
        launches: Launches that ran.
        busy_us: With a launch on it.
        bubble_us: With none while work existed.
        window_us: In all.
    """

    launches: int = 0
    busy_us: float = 0.0
    bubble_us: float = 0.0
    window_us: float = 0.0

    @property
    def ratio(self) -> float:
        """Share of the time while work existed with no kernel; 0 of nothing."""
        with_work = self.busy_us + self.bubble_us
        return self.bubble_us / with_work if with_work else 0.0

    @property
    def idle_ratio(self) -> float:
        """MuxWise's: share of the window with no kernel; 0 of nothing."""
        return 1.0 - self.busy_us / self.window_us if self.window_us else 0.0


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Both lanes' bubbles.

    Attributes:
        decode, prefill: By lane.
    """

    decode: LaneBubbles = field(default_factory=LaneBubbles)
    prefill: LaneBubbles = field(default_factory=LaneBubbles)

    @property
    def ratio(self) -> float:
        """Mean over the lanes that ran something."""
        return _mean([lane.ratio for lane in self._lanes()])

    @property
    def muxwise_ratio(self) -> float:
        """MuxWise's: mean over the lanes that ran something of their time with no kernel."""
        return _mean([lane.idle_ratio for lane in self._lanes()])

    def _lanes(self) -> list[LaneBubbles]:
        return [lane for lane in (self.decode, self.prefill) if lane.launches]


class BubbleMeter(Reader):
    """Adds up bubbles launch by launch, in memory that does not grow with their number.

    Fed by a `Timeline` (`attach`): launches of a lane in order, and what there was to do before a
    launch ended before that launch.
    """

    def __init__(self) -> None:
        self._lanes: dict[Lane, _LaneMeter] = {lane: _LaneMeter(lane) for lane in LANES}
        self._first_us: float | None = None

    def span(self, span: Span) -> Gap | None:
        """The gap in front of it on its lane, if there is one."""
        if self._first_us is None or span.begin_us < self._first_us:
            self._first_us = span.begin_us
        return self._lanes[span.lane].span(span)

    def state(self, state: State) -> None:
        for meter in self._lanes.values():
            meter.state(state)

    def bubbles(self) -> Bubbles:
        """So far. Time before a lane's first launch and after its last counts where work for it
        existed then, within the window."""
        if self._first_us is None:
            return Bubbles()
        last_us = max(meter.end_us for meter in self._lanes.values() if meter.launches)
        decode, prefill = (self._lanes[lane].total(self._first_us, last_us) for lane in LANES)
        return Bubbles(decode, prefill)


class _LaneMeter:
    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.launches = 0
        self.end_us = 0.0
        self._busy_us = 0.0
        self._bubble_us = 0.0
        self._has_work = False  # at end_us
        self._changes: deque[tuple[float, bool]] = deque()  # after end_us, in order

    def state(self, state: State) -> None:
        has_work = state.has_work(self.lane)
        latest = self._changes[-1][1] if self._changes else self._has_work
        if has_work != latest:
            self._changes.append((state.at_us, has_work))
            if len(self._changes) > CHANGES:
                self._forget_oldest()

    def span(self, span: Span) -> Gap | None:
        begin_us = max(span.begin_us, self.end_us)  # clocks of events round
        gap = None
        if self.launches and begin_us > self.end_us:
            launched_us = min(max(span.launched_us, self.end_us), begin_us)
            bubbles = self._advance(self.end_us, launched_us)
            gap = Gap(self.lane, self.end_us, begin_us, _join(bubbles, (launched_us, begin_us)))
            self._bubble_us += gap.bubble_us
        elif not self.launches:
            # What lies before the lane's first launch: to the window's begin at the most, and that
            # is known in the end only.
            self._first_us, self._before = span.launched_us, self._leave(begin_us)
            self._begin_us = begin_us
        end_us = max(span.end_us, begin_us)
        self._advance(begin_us, end_us)
        self._busy_us += end_us - begin_us
        self.launches += 1
        self.end_us = end_us
        return gap

    def total(self, first_us: float, last_us: float) -> LaneBubbles:
        """Within a window that holds all of the lane's launches."""
        window_us = last_us - first_us
        if not self.launches:
            return LaneBubbles(window_us=window_us)
        launched_us = min(max(self._first_us, first_us), self._begin_us)
        before = _with_work(self._before, first_us, launched_us)
        changes = [(self.end_us, self._has_work), *self._changes]
        after = _with_work(changes, self.end_us, last_us)
        bubble_us = self._bubble_us + self._begin_us - launched_us + _total([*before, *after])
        return LaneBubbles(self.launches, self._busy_us, bubble_us, window_us)

    def _forget_oldest(self) -> None:
        """Count the oldest stretch with work: a lane may launch nothing for days."""
        begin_us, has_work = self._changes.popleft()
        end_us = begin_us
        if has_work:
            end_us, self._has_work = self._changes.popleft()
        elif self._has_work:
            begin_us, self._has_work = self.end_us, False
        self._bubble_us += max(end_us - max(begin_us, self.end_us), 0.0)

    def _advance(self, begin_us: float, end_us: float) -> list[Stretch]:
        """Where there was work from a time to a time; the changes up to then are forgotten."""
        return _with_work(self._leave(end_us, begin_us), begin_us, end_us)

    def _leave(self, end_us: float, begin_us: float = 0.0) -> list[tuple[float, bool]]:
        """Whether there was work from `begin_us` on, as changes, up to `end_us`; forgotten here."""
        left = [(begin_us, self._has_work)]
        while self._changes and self._changes[0][0] <= end_us:
            left.append(self._changes.popleft())
        self._has_work = left[-1][1]
        return left


def _with_work(changes: list[tuple[float, bool]], begin_us: float, end_us: float) -> list[Stretch]:
    """From each change to True to the next change, within a stretch."""
    found = []
    for index, (at_us, has_work) in enumerate(changes):
        until_us = changes[index + 1][0] if index + 1 < len(changes) else end_us
        stretch = max(at_us, begin_us), min(until_us, end_us)
        if has_work and stretch[1] > stretch[0]:
            found.append(stretch)
    return found


def _join(stretches: list[Stretch], last: Stretch) -> tuple[Stretch, ...]:
    """With one more behind them, which may touch the last of them, or be empty."""
    if last[1] <= last[0]:
        return tuple(stretches)
    if stretches and stretches[-1][1] == last[0]:
        return (*stretches[:-1], (stretches[-1][0], last[1]))
    return (*stretches, last)


def _total(stretches: Iterable[Stretch]) -> float:
    return sum(end_us - begin_us for begin_us, end_us in stretches)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def gaps(trace: Trace) -> tuple[Gap, ...]:
    """The gaps of a trace's lanes between launches, by lane, in order."""
    meter = BubbleMeter()
    for state in trace.states:
        meter.state(state)
    found = []
    for lane in LANES:
        found += [gap for span in trace.lane(lane) if (gap := meter.span(span)) is not None]
    return tuple(found)


def bubbles(trace: Trace) -> Bubbles:
    """The bubbles of a trace."""
    meter = BubbleMeter()
    for state in trace.states:
        meter.state(state)
    for span in sorted(trace.spans):
        meter.span(span)
    return meter.bubbles()
