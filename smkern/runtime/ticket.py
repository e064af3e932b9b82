"""A launch on its way, from the host's call until a poll sees it over."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.errors import DeviceError
from smkern.runtime.device import Event, NoAnswerError, Work, is_over
from smkern.runtime.place import Lane, Place


@dataclass(slots=True, eq=False)
class Ticket:
    """A launch on its way.

    Attributes:
        number: Number of the launch, from 0.
        lane, place, work: What was launched, and where.
        launched_us: When the host launched it.
        event: Its end on the device.
        host_us: How long the host took to launch it.
        seen_us: When the host saw it over; None: not yet.
        error: What the device reported to a `query`, for the next `poll`.
        fence: Of one that was abandoned and may still run: over when it is.
    """

    number: int
    lane: Lane
    place: Place
    work: Work
    launched_us: float
    event: Event
    host_us: float = 0.0
    seen_us: float | None = None
    error: DeviceError | None = None
    fence: Event | None = None

    @property
    def is_over(self) -> bool:
        return self.seen_us is not None

    def query(self) -> bool:
        """Whether it is over, as the last `poll` saw it or as the device says; never waits.

        One that failed runs no more. Its error, which a device may tell once only, is kept for
        `poll`: a caller here waits for pages, and can do nothing about it.
        """
        event = self.fence
        if event is None:
            if self.seen_us is not None or self.error is not None:
                return True
            event = self.event
        try:
            return is_over(event)
        except NoAnswerError:  # the next `poll` asks, too
            return False
        except DeviceError as error:
            self.error = error
            return True
