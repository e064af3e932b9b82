"""A device that is this process: work runs while it is launched, and is over at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smkern.runtime.device import Device, Event, Work
from smkern.runtime.place import Lane, Place

HOST_SMS = 132
"""What the places of a CPU are cut from: an H200's, so that rungs mean the same."""


def host_us() -> float:
    """The host's clock, microseconds."""
    return time.perf_counter_ns() / 1000


@dataclass(frozen=True, slots=True)
class HostEvent:
    """Work that is over.

    Attributes:
        begun_us, ended_us: When it ran.
    """

    begun_us: float
    ended_us: float

    def query(self) -> bool:
        return True

    def times_us(self) -> tuple[float, float]:
        return self.begun_us, self.ended_us


class HostDevice(Device):
    """Runs each work when it is launched, for models on CPU tensors and for tests.

    Args:
        rungs: Rungs of the splits that it plays.

    Example:
        >>> from smkern.runtime.device import Work
        >>> from smkern.runtime.place import Place
        >>> device, seen = HostDevice(rungs=[32]), []
        >>> event = device.launch("decode", Place.of("decode", 32, 132), Work("x", seen.append))
        >>> event.query(), seen[0].num_sms
        (True, 32)
    """

    def __init__(self, *, rungs: Sequence[int] = ()) -> None:
        self.num_sms = HOST_SMS  # nothing is confined
        self.rungs = tuple(sorted(rungs))

    def now_us(self) -> float:
        return host_us()

    def launch(self, lane: Lane, place: Place, work: Work) -> HostEvent:
        begun = host_us()
        work.run(place)
        return HostEvent(begun, host_us())

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        """Run something behind a lane's launches: they are over."""
        run()

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        """All is over; sleeps until the moment where there is nothing to look at."""
        if not events and until_us is not None:
            time.sleep(max(until_us - host_us(), 0) / 1e6)
