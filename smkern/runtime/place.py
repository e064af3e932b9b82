"""Where work runs: a side of a rung, or the whole device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["decode", "prefill"]
"""Two queues of work, each in order."""
LANES: tuple[Lane, Lane] = ("decode", "prefill")


@dataclass(frozen=True, slots=True)
class Place:
    """SMs that work may use.

    Attributes:
        side: "whole", or a side of a split.
        rung: SMs of the split's decode side; 0 for "whole".
        num_sms: SMs of this place.
    """

    side: Literal["whole", "decode", "prefill"]
    rung: int
    num_sms: int

    @classmethod
    def whole(cls, num_sms: int) -> Place:
        return cls("whole", 0, num_sms)

    @classmethod
    def of(cls, lane: Lane, rung: int | None, num_sms: int) -> Place:
        """The side of a lane on a rung of a device of `num_sms` SMs; None: all of it."""
        if rung is None:
            return cls.whole(num_sms)
        return cls(lane, rung, rung if lane == "decode" else num_sms - rung)

    def overlaps(self, other: Place) -> bool:
        """Whether they share SMs; rungs are nested, so a larger one holds every smaller one."""
        if "whole" in (self.side, other.side) or self.side == other.side:
            return True
        decode, prefill = (self, other) if self.side == "decode" else (other, self)
        return decode.rung > prefill.rung
