"""A device whose work ends when a test says so."""

from __future__ import annotations

from collections.abc import Sequence

from smkern.errors import DeviceError
from smkern.runtime.device import Work
from smkern.runtime.place import Lane, Place


class ManualEvent:
    """The end of a launch, over once `over` is set."""

    def __init__(self) -> None:
        self.over = False
        self.error: DeviceError | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over

    def times_us(self) -> tuple[float, float] | None:
        return None


class ManualDevice:
    """Two lanes in order; time goes by while somebody waits.

    Attributes:
        launched: Every launch: its lane, place, work and event.
        waits: What `wait` was asked for.
    """

    def __init__(self, num_sms: int = 132, rungs: Sequence[int] = (16, 48, 96)) -> None:
        self.num_sms = num_sms
        self.rungs = tuple(rungs)
        self.clock_us = 0.0
        self.launched: list[tuple[Lane, Place, Work, ManualEvent]] = []
        self.waits: list[float | None] = []

    def now_us(self) -> float:
        return self.clock_us

    def launch(self, lane: Lane, place: Place, work: Work) -> ManualEvent:
        work.run(place)
        event = ManualEvent()
        self.launched.append((lane, place, work, event))
        return event

    def wait(self, events: Sequence[ManualEvent], until_us: float | None = None) -> None:
        """The first of the events ends."""
        self.waits.append(until_us)
        self.clock_us += 1.0
        if events:
            events[0].over = True

    def end(self, lane: Lane, count: int = 1) -> None:
        """The lane's next launches end."""
        left = [event for of, _, _, event in self.launched if of == lane and not event.over]
        for event in left[:count]:
            event.over = True


def work(name: str = "work", launches: int = 1) -> Work:
    """Work that does nothing."""
    return Work(name, lambda place: None, launches=launches)
