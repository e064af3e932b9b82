"""The protocol of what work runs on: two lanes in order, events, a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from smkern.errors import ArgumentError, DeviceError
from smkern.latency import Size
from smkern.limits import as_int, shown
from smkern.runtime.place import LANES, Lane, Place

if TYPE_CHECKING:
    from smkern.partition import Partition


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Something to launch.

    Attributes:
        name: What the timeline calls it: "decode", "prefill", "mixed", or an engine's own name.
        run: Launches it on the current stream, at a place; returns without waiting.
        size: What it is made of; None: unknown, nothing is predicted of it.
        launches: Kernels (a graph is one) that it puts into the stream's queue.
        about: More for the timeline, such as the first layer and the requests.
        left: How many of the kernels are still to be done, at most, once it is launched, by its
            end; asked while it is its lane's first and the queue is full. None: all, to the end.

    Raises:
        ArgumentError: launches that are no whole number of at least 0.
    """

    name: str
    run: Callable[[Place], Any]
    size: Size | None = None
    launches: int = 1
    about: dict[str, Any] | None = None
    left: Callable[[Event], int] | None = None

    def __post_init__(self) -> None:
        if type(self.launches) is not int or self.launches < 0:
            as_int(f"launches of {self.name!r}", self.launches, 0)


def check_launch(lane: object, work: object) -> None:
    """Raise ArgumentError for a lane that there is not, or work that cannot be launched."""
    if lane not in LANES:
        raise ArgumentError(f"lane={shown(lane)}: give one of {LANES}")
    if not isinstance(work, Work):
        raise ArgumentError(f"work={shown(work)}: pass a Work(name, run), whose run launches it")
    if not callable(work.run):
        raise ArgumentError(
            f"run={shown(work.run)} of {work.name!r}: pass what takes a Place and launches the work"
        )
    if work.about is not None and not isinstance(work.about, Mapping):
        raise ArgumentError(f"about={shown(work.about)} of {work.name!r}: pass a dict, or None")


class Event(Protocol):
    """The end of a launch."""

    def query(self) -> bool:
        """Whether it is over; never waits.

        Raises:
            DeviceError: the device reported an error.
        """
        ...

    def times_us(self) -> tuple[float, float] | None:
        """When it began and ended on the device, on the device's clock; None: not known (yet)."""
        ...


class NoAnswerError(DeviceError):
    """A launch could not be asked whether it is over, and may still run."""


def is_over(event: Event) -> bool:
    """`Event.query`.

    Raises:
        DeviceError: as it raises.
        NoAnswerError: it raised anything else, or answered what is no bool.
    """
    try:
        answer = event.query()
    except Exception as reason:  # noqa: BLE001  raised as the device's
        error = as_device_error(reason)
    else:
        if type(answer) is bool:
            return answer
        error = no_bool(answer)
    raise error


def no_bool(answer: object) -> NoAnswerError:
    """The error of such an answer of `Event.query`."""
    return NoAnswerError(
        f"query() of a launch's event answered {shown(answer)}: its requests fail; let it return "
        "True or False"
    )


def as_device_error(reason: Exception) -> DeviceError:
    """What `Event.query` raised, as an error of the device."""
    if isinstance(reason, DeviceError):
        return reason
    error = NoAnswerError(
        f"{type(reason).__name__} when a launch was asked whether it is over ({reason}): its "
        "requests fail; look at the device's events"
    )
    error.__cause__ = reason
    return error


def times_us(event: Event) -> tuple[float, float] | None:
    """`Event.times_us`; None also for what is no two times: they are for statistics alone."""
    try:
        begin_us, end_us = event.times_us()  # type: ignore[misc]
        return float(begin_us), float(end_us)
    except Exception:  # noqa: BLE001  as if they were not known
        return None


class Device(Protocol):
    """Two lanes of work, events and a clock: a GPU, a CPU, or a simulation.

    Work of one lane runs in the order of its launches, wherever each of them runs. What has a
    default here is for devices that derive from this.

    Attributes:
        num_sms: SMs of the device.
        rungs: SMs of the decode side of each split.
        can_share: Whether two lanes may run at once on the same SMs.
    """

    num_sms: int
    rungs: tuple[int, ...]
    can_share: bool = True

    def now_us(self) -> float:
        """The clock."""
        ...

    def launch(self, lane: Lane, place: Place, work: Work) -> Event:
        """Launch behind the lane's earlier work; the event is over when it is.

        What `work.run` raises comes out as it is. Part of it may be on the lane then: what is
        launched next, a fence too, is over behind it.
        """
        ...

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        """Let time go by until one of the events may be over, or until a moment.

        A GPU's sleeps for microseconds; a simulation's moves its clock to the next end of a launch
        or to `until_us`, whichever comes first.
        """
        ...

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        """Let `run` add to a lane, behind its last launch and where that runs, what no caller waits
        for; what it raises comes out as it is.

        By default it is not called: the caller must do without.
        """
        return

    def synchronize(self) -> None:
        """Wait for all that was launched; by default nothing is left to wait for."""
        return

    def partition(self, place: Place) -> Partition | None:
        """The partition of a place; None, as by default: the whole device."""
        return None
