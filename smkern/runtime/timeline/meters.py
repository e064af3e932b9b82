"""What statistics are made of: distributions, work done, changes of the split."""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smkern.runtime.place import LANES, Lane
from smkern.runtime.timeline.trace import Choice, Reader, Span

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

EXACT = 4096
"""Values that are kept as they are: to sort so many takes half a millisecond, between two steps."""
L2_BYTES = 60 << 20
"""L2 of an H200: a kernel's activations up to so many bytes are not off-chip traffic."""
STEP = math.log(1.01)
"""Width of a bin, as a logarithm; its middle is within 0.5% of all of it."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a number of values was like; all 0 of none.

    Attributes:
        count: Values.
        mean, p50, p90, p99, max: In the values' unit. The q-th percentile is the smallest value
            that is at least as large as q percent of them.
    """

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Samples:
    """Collects values that are not negative.

    Args:
        exact: Values to keep as they are; with more of them percentiles are those of bins that are
            1% wide, and memory no longer grows.

    Example:
        >>> samples = Samples()
        >>> for gap_us in (10.0, 20.0, 40.0):
        ...     samples.add(gap_us)
        >>> samples.distribution().p50
        20.0
    """

    def __init__(self, exact: int = EXACT) -> None:
        self._exact = exact
        self._values: array[float] | None = array("d")
        self._bins: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.max = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.count += 1
        self.total += value
        if value > self.max:
            self.max = value
        # From the first value on: 65,536 at once took 28 ms. Below a thousandth of the unit all is
        # one bin.
        index = max(-700, round(math.log(value) / STEP)) if value > 0 else -700
        self._bins[index] = self._bins.get(index, 0) + 1
        if self._values is not None:
            if self.count <= self._exact:
                self._values.append(value)
            else:
                self._values = None

    def distribution(self) -> Distribution:
        """The distribution so far."""
        if not self.count:
            return Distribution()
        if self._values is not None:
            ordered = [(value, 1) for value in sorted(self._values)]
        else:
            ordered = [(_middle(index), n) for index, n in sorted(self._bins.items())]
        p50, p90, p99 = (min(self.max, self._at(ordered, percent)) for percent in (50, 90, 99))
        return Distribution(self.count, self.total / self.count, p50, p90, p99, self.max)

    def _at(self, ordered: list[tuple[float, int]], percent: float) -> float:
        wanted = max(1, math.ceil(self.count * percent / 100 - 1e-9))
        passed = 0
        for value, count in ordered:
            passed += count
            if passed >= wanted:
                return value
        return self.max


def _middle(index: int) -> float:
    return math.exp(index * STEP) if index > -700 else 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What a lane's launches computed and moved.

    Attributes:
        flops: FLOPs of the model's products and attention.
        bytes_moved: Weights and cached keys and values once a launch, and activations where a
            kernel's exceed the L2.
        busy_us: Time with a launch on the lane.
    """

    flops: float = 0.0
    bytes_moved: float = 0.0
    busy_us: float = 0.0

    @property
    def tflops(self) -> float:
        """FLOPs over the busy time, TFLOP/s."""
        return self.flops / self.busy_us / 1e6 if self.busy_us else 0.0

    @property
    def tbps(self) -> float:
        """Bytes over the busy time, TB/s."""
        return self.bytes_moved / self.busy_us / 1e6 if self.busy_us else 0.0


class RateMeter(Reader):
    """Adds up the FLOPs and bytes of launches that say what they are made of.

    Args:
        config: The model; None: nothing is counted.
    """

    def __init__(self, config: ModelConfig | None) -> None:
        self._costs = None
        if config is not None:
            from smkern.latency.cost import Costs

            self._costs = Costs(config, l2_bytes=L2_BYTES)
        self._flops: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self._bytes: dict[Lane, float] = dict.fromkeys(LANES, 0.0)

    def span(self, span: Span) -> None:
        if self._costs is None or span.size is None or not span.is_over:
            return
        cost = self._costs.of(span.size)
        self._flops[span.lane] += cost.flops
        self._bytes[span.lane] += cost.bytes_moved

    def rate(self, lane: Lane, busy_us: float) -> Rate:
        return Rate(self._flops[lane], self._bytes[lane], busy_us)


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
        """Host time of the first launch, from the latest decision before it that is remembered."""
        first_us = min(self.launched_us.values())
        before = (at_us for at_us in self.asked_us if at_us <= first_us)
        # A launch is seen over long after it was made: by then all before it may be forgotten.
        return first_us - max(before, default=self.at_us)


class SwitchMeter(Reader):
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

    def switches(self) -> Switches:
        """So far; the latest change counts once both sides have moved."""
        return Switches(self._count, self._host.distribution(), self._handover.distribution())

    def _close(self) -> None:
        move, self._move = self._move, None
        if move is None or not move.launched_us:
            return
        self._host.add(move.host_us)
        self._handover.add(max(move.launched_us.values()) - move.at_us)
