"""A launch on a simulated device: how far it is, its end, and what may go wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smkern.errors import DeviceError
from smkern.latency import Size
from smkern.runtime.place import Lane, Place

if TYPE_CHECKING:
    from smkern.runtime.sim.device import SimDevice

Fault = Literal["raise", "hang", "error", "lost"]
"""What a launch may do wrong: its `run` raises ("raise"); it never ends ("hang"); asking whether it
is over raises, once, and what it drew is gone ("error"), or raises for ever, whatever is
asked ("lost"), as after an illegal address on a GPU."""
FAULTS: tuple[Fault, ...] = ("raise", "hang", "error", "lost")


class SimEvent:
    """The end of a launch on the virtual clock.

    Attributes:
        number: Number of the device's launch, from 0.
        lane: Lane of the launch.
        began_us, ended_us: Exact; None: not yet.
        fault: What goes wrong with it.
        is_gone: Whether an error took it: it does not run any more, and never ended.
    """

    __slots__ = ("_device", "began_us", "ended_us", "fault", "is_gone", "lane", "number")

    def __init__(self, device: SimDevice, number: int, lane: Lane, fault: Fault | None) -> None:
        self._device = device
        self.fault = fault
        self.number = number
        self.lane = lane
        self.began_us: float | None = None
        self.ended_us: float | None = None
        self.is_gone = False

    def __repr__(self) -> str:
        return f"SimEvent({self.number}, {self.lane!r}, {self.began_us}, {self.ended_us})"

    @property
    def is_pending(self) -> bool:
        """Whether the launch runs, or will."""
        lost = self._device.lost_by is not None  # nothing runs on a lost device
        return self.ended_us is None and not self.is_gone and not lost

    def query(self) -> bool:
        """Whether the launch is over, or gone.

        Raises:
            DeviceError: a fault that was asked for.
        """
        self._device.check_alive()
        if self.fault == "error" and self.ended_us is not None:
            self.fault, self.ended_us, self.is_gone = None, None, True
            raise DeviceError(
                f"launch {self.number} on the {self.lane} lane failed (a fault that was asked "
                "for): what it drew is gone; abandon it, and launch again"
            )
        return not self.is_pending

    def times_us(self) -> tuple[float, float] | None:
        """When it began and ended."""
        if self.began_us is None or self.ended_us is None:
            return None
        return self.began_us, self.ended_us


@dataclass(slots=True, eq=False)
class Queued:
    """A launch in its lane; times are those that it takes alone."""

    event: SimEvent
    place: Place
    size: Size | None
    alone_us: float
    launched_us: float = 0.0
    """How much of it the host has launched: layers come one by one."""
    done_us: float = 0.0
    is_launched: bool = False

    @property
    def left_us(self) -> float:
        """The part of what is launched that is not done."""
        return self.launched_us - self.done_us

    @property
    def is_busy(self) -> bool:
        return self.done_us < self.launched_us

    @property
    def is_over(self) -> bool:
        return self.is_launched and not self.is_busy and self.event.fault != "hang"
