"""Timelines written by hand: launches with the times that a test wants, no device."""

from __future__ import annotations

from dataclasses import dataclass, field

from smkern.latency import Size
from smkern.policies import Decision, Snapshot, Waiting
from smkern.policies.snapshot import PrefillView
from smkern.runtime.device import Work
from smkern.runtime.place import Lane, Place
from smkern.runtime.ticket import Ticket
from smkern.runtime.timeline.timeline import Timeline

NUM_SMS = 132
ALL = Place.whole(NUM_SMS)


@dataclass(slots=True)
class Over:
    """An event that ended at a time, on a device that may not know when."""

    times: tuple[float, float] | None

    def query(self) -> bool:
        return True

    def times_us(self) -> tuple[float, float] | None:
        return self.times


@dataclass(slots=True)
class Script:
    """Feeds a timeline as an interleaver would.

    Attributes:
        timeline: What is fed.
        now_us: Its clock.
    """

    capacity: int = 1000
    predictor: object = None
    now_us: float = 0.0
    count: int = 0
    timeline: Timeline = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(
            NUM_SMS,
            clock=lambda: self.now_us,
            capacity=self.capacity,
            predictor=self.predictor,  # type: ignore[arg-type]
        )

    def start(
        self, lane: Lane, launched_us: float, place: Place = ALL, *, name: str = "work",
        size: Size | None = None, about: dict | None = None, times: tuple | None = None,
    ) -> Ticket:  # fmt: skip
        """A launch on its way."""
        work = Work(name, lambda place: None, size, about=about)
        ticket = Ticket(self.count, lane, place, work, launched_us, Over(times))
        self.count += 1
        self.timeline.launched(ticket)
        return ticket

    def ran(
        self, lane: Lane, begin_us: float, end_us: float, *, launched_us: float | None = None,
        place: Place = ALL, seen_us: float | None = None, knows: bool = True,
        name: str = "work", size: Size | None = None, about: dict | None = None,
    ) -> Ticket:  # fmt: skip
        """A launch that ran from a time to a time, launched as it began and seen as it ended."""
        launched_us = begin_us if launched_us is None else launched_us
        times = (begin_us, end_us) if knows else None
        ticket = self.start(
            lane, launched_us, place, name=name, size=size, about=about, times=times
        )
        ticket.seen_us = end_us if seen_us is None else seen_us
        self.now_us = max(self.now_us, ticket.seen_us)
        self.timeline.over(ticket)
        return ticket

    def decided(self, at_us: float, decision: Decision, **snapshot: object) -> None:
        self.now_us = max(self.now_us, at_us)
        self.timeline.decided(snapshot_at(at_us, **snapshot), decision)


def snapshot_at(at_us: float, **changes: object) -> Snapshot:
    """A snapshot of an empty runtime on the whole of the device, but for what is given."""
    values: dict = {
        "trigger": "decode", "rungs": (16, 32), "num_sms": NUM_SMS, "num_layers": 4,
        "free_pages": 100, "page_size": 16, "max_running": 8, "max_prefill": 4, "max_tokens": 1024,
    }  # fmt: skip
    return Snapshot(now_us=at_us, **{**values, **changes})


def waiting(count: int, *, pages: int = 1) -> tuple[Waiting, ...]:
    return tuple(Waiting(100 + i, 0.0, 10, pages=pages) for i in range(count))


def batch_of(*ids: int) -> PrefillView:
    return PrefillView(ids, ((10, 0),) * len(ids), 1, 0.0)
