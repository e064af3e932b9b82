"""Changes of the split: from the decision to the first launch on the new rung."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from smkern.runtime.place import LANES, Lane
from smkern.runtime.timeline.samples import Distribution, Samples
from smkern.runtime.timeline.trace import Choice, Span, State

ASKED = 256
"""Decisions that are remembered until the first launch on a new rung was seen over."""


@dataclass(frozen=True, slots=True)
class Switches:
    """Changes of the split so far.

    Attributes:
        count: Decisions for another rung, or between a split and the whole device.
        host_us: Host time of the first launch on the new rung, from the decision that made it. That
            is a later one than the first for this rung where queues were full meanwhile.
        handover_us: From such a decision to the launch of the side that moved last: it waits until
            the other's work on the old rung is over. Of one side alone, where only one had work.
    """

    count: int = 0
    host_us: Distribution = field(default_factory=Distribution)
    handover_us: Distribution = field(default_factory=Distribution)


@dataclass(slots=True)
class _Move:
    at_us: float
    rung: int | None
    asked_us: deque[float]
    launched_us: dict[Lane, float] = field(default_factory=dict)

    @property
    def host_us(self) -> float:
        """Of the first launch, from the latest decision before it."""
        first_us = min(self.launched_us.values())
        return first_us - max(at_us for at_us in self.asked_us if at_us <= first_us)


class SwitchMeter:
    """Follows each change of the split until both sides have moved, or the next change."""

    def __init__(self) -> None:
        self._count = 0
        self._host = Samples()
        self._handover = Samples()
        self._rung: int | None = None
        self._move: _Move | None = None

    def choice(self, choice: Choice) -> None:
        if choice.rung == self._rung:
            if self._move is not None and not self._move.launched_us:
                self._move.asked_us.append(choice.at_us)
            return
        self._close()
        self._count += 1
        self._rung = choice.rung
        self._move = _Move(choice.at_us, choice.rung, deque([choice.at_us], maxlen=ASKED))

    def span(self, span: Span) -> None:
        move = self._move
        if move is None or span.launched_us < move.at_us or span.lane in move.launched_us:
            return
        rung = None if span.place.side == "whole" else span.place.rung
        if rung != move.rung:
            return
        move.launched_us[span.lane] = span.launched_us
        if len(move.launched_us) == len(LANES):
            self._close()

    def state(self, state: State) -> None:
        """What there is to do does not matter here."""

    def switches(self) -> Switches:
        """So far; the latest change counts once both sides have moved."""
        return Switches(self._count, self._host.distribution(), self._handover.distribution())

    def _close(self) -> None:
        move, self._move = self._move, None
        if move is None or not move.launched_us:
            return
        self._host.add(move.host_us)
        self._handover.add(max(move.launched_us.values()) - move.at_us)
