"""A device without a clock of its own: what is launched has run, and is over some waits later."""

from __future__ import annotations

from collections.abc import Sequence

from smkern.runtime.device import Event, Work
from smkern.runtime.place import Lane, Place


class _End:
    def __init__(self, device: Lagging, at: float) -> None:
        self._device = device
        self._at = at

    def query(self) -> bool:
        return self._device.now >= self._at

    def times_us(self) -> None:
        return None


class Lagging:
    """Each lane's launches take so many waits each, one behind the other.

    Args:
        decode, prefill: Waits that a launch of the lane takes.
    """

    num_sms = 132
    rungs = (16, 32, 64)

    def __init__(self, *, decode: int = 1, prefill: int = 3) -> None:
        self.now = 0.0
        self._waits = {"decode": decode, "prefill": prefill}
        self._ends = dict.fromkeys(self._waits, 0.0)

    def now_us(self) -> float:
        return self.now

    def launch(self, lane: Lane, place: Place, work: Work) -> Event:
        work.run(place)
        self._ends[lane] = max(self._ends[lane], self.now) + self._waits[lane]
        return _End(self, self._ends[lane])

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        self.now += 1
