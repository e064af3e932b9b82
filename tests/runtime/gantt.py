"""What ran when on a simulated device, as a picture of letters that a test can compare."""

from __future__ import annotations

from smkern.latency import Size
from smkern.runtime.device import Work
from smkern.runtime.place import LANES, Lane, Place
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.event import SimEvent


class RoundTimes:
    """A decode step takes 10 ms anywhere; a layer of prompts 1 us a token on half of the SMs."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        layers = size.layers * size.new_tokens * 50.0 / num_sms
        return layers + (10_000.0 if size.batch else 0.0)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 1.0


class DrawnDevice(SimDevice):
    """A simulated device of 100 SMs that remembers its launches."""

    def __init__(self, **options: float) -> None:
        super().__init__(100, (20, 50), RoundTimes(), **options)
        self.drawn: list[tuple[Lane, Place, Work, SimEvent]] = []

    def launch(self, lane: Lane, place: Place, work: Work) -> SimEvent:
        event = super().launch(lane, place, work)
        self.drawn.append((lane, place, work, event))
        return event

    def picture(self, column_us: float, start_us: float = 0.0) -> list[str]:
        """A line a lane, a letter a column: what runs in its middle.

        "d" is a decode step, "m" a mixed one, "a", "b", ... are layers of the batch whose first
        request has the number 0, 1, ...; capitals run on the whole device, "." is idle.
        """
        ends = [event.ended_us or 0.0 for *_, event in self.drawn]
        columns = round((max(ends) - start_us) / column_us)
        lines = {lane: ["."] * columns for lane in LANES}
        for lane, place, work, event in self.drawn:
            began_us, ended_us = event.times_us() or (0.0, 0.0)
            for column in range(columns):
                if began_us <= start_us + (column + 0.5) * column_us < ended_us:
                    lines[lane][column] = _letter(place, work)
        return ["".join(lines[lane]) for lane in LANES]

    def busy_us(self, lane: Lane, start_us: float, end_us: float) -> float:
        """How long a lane ran within a span."""
        total = 0.0
        for its_lane, _, _, event in self.drawn:
            began_us, ended_us = event.times_us() or (0.0, 0.0)
            if its_lane == lane:
                total += max(0.0, min(ended_us, end_us) - max(began_us, start_us))
        return total


def _letter(place: Place, work: Work) -> str:
    if work.name != "prefill":
        letter = work.name[0]
    else:
        letter = chr(ord("a") + (work.about or {})["requests"][0])
    return letter.upper() if place.side == "whole" else letter
