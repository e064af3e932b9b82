"""What a loop waits for: requests that come later, launches that hang."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush
from math import inf

from smkern.errors import ArgumentError, StalledError
from smkern.limits import MAX_FLOAT, shown
from smkern.runtime.executor import Executor
from smkern.runtime.request import Request
from smkern.runtime.ticket import Ticket
from smkern.runtime.timeline.timeline import Timeline


def as_time(name: str, value: float) -> float:
    """A finite time of at least 0; ArgumentError for anything else."""
    try:
        is_text = isinstance(value, str | bytes | bytearray)
        is_time = not (is_text or isinstance(value, bool)) and 0 <= float(value) < inf
    except Exception:  # noqa: BLE001  of whatever stands for a number
        is_time = False
    if not is_time:
        raise ArgumentError(f"{name}={shown(value)}: give a finite number of at least 0, or None")
    return float(value)


def as_wait(name: str, value: float | None) -> float:
    """As `as_time`, for what may be without end: None, or infinite."""
    if value is None or (isinstance(value, float) and value == inf):
        return inf
    return as_time(name, value)


def earliest(*moments: float | None) -> float | None:
    """The first of those that there are."""
    return min([moment for moment in moments if moment is not None], default=None)


def catch_up(executor: Executor, timeline: Timeline) -> None:
    """Nothing runs or waits: let an executor do what it has put off until then; it may wait."""
    try:
        executor.idle()
    except Exception as error:  # noqa: BLE001  it did without so far, and goes on to
        timeline.note("put off", error=str(error))


class Arrivals:
    """Requests that come later, for replays."""

    def __init__(self) -> None:
        self._future: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._future)

    @property
    def next_us(self) -> float | None:
        """When the next one comes."""
        return self._future[0][0] if self._future else None

    def add(self, request: Request) -> None:
        """A request that comes at its `arrival_us`."""
        request.stage = "future"
        heappush(self._future, (request.arrival_us, request.index, request))

    def due(self, now_us: float) -> list[Request]:
        """Those that have come, in their order, without those cancelled meanwhile."""
        came: list[Request] = []
        while self._future and self._future[0][0] <= now_us:
            request = heappop(self._future)[2]
            if request.stage == "future":
                came.append(request)
        return came


class Watchdog:
    """Tells a device that hangs, and pages that never come back.

    Args:
        timeout_s: So long may pass in which nothing of what is on its way ends, or nothing is.

    Raises:
        ArgumentError: a timeout that is not above 0.
    """

    def __init__(self, timeout_s: float) -> None:
        if not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise ArgumentError(f"stall_timeout_s={shown(timeout_s)}: give seconds above 0")
        self._timeout_us = 1e6 * min(timeout_s, MAX_FLOAT)
        self._quiet_since_us = 0.0
        self._was_empty = False

    def look(
        self, now_us: float, is_over: bool, on_their_way: Collection[Ticket], is_waiting: bool
    ) -> None:
        """After a poll.

        Args:
            now_us: The clock.
            is_over: Whether anything was.
            on_their_way: Launches that are not over.
            is_waiting: Whether requests are there.

        Raises:
            StalledError: nothing has ended for too long, or been launched.
        """
        is_empty, was_empty = is_waiting and not on_their_way, self._was_empty
        self._was_empty = is_empty
        if is_over or is_empty != was_empty or not (is_waiting or on_their_way):
            self._quiet_since_us = now_us
        elif now_us - self._quiet_since_us <= self._timeout_us:
            return
        elif is_empty:
            raise StalledError(
                f"nothing could be launched for {self._timeout_us / 1e6:g} s, and requests wait: "
                "somebody else's work that does not end keeps pages of this pool, or a launch that "
                "raised hangs; look at pool.usage, and raise stall_timeout_s where that takes so "
                "long"
            )
        else:
            names = [f"{x.work.name} on {x.place.num_sms} SMs" for x in on_their_way]
            raise StalledError(
                f"nothing has ended for {self._timeout_us / 1e6:g} s while {names[:4]} were on "
                "their way: the device hangs; look at timeline.save(), and raise stall_timeout_s "
                "where launches take so long"
            )
