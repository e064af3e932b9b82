"""A predictor that follows the chip it runs on: what ended corrects what is predicted next."""

from __future__ import annotations

from math import exp, log

from smkern.errors import ArgumentError
from smkern.latency.predictor import Predictor
from smkern.latency.work import Kind, Size

LOW, HIGH = 0.75, 1.5
"""Between which a factor stays: chips differ by a few per cent, a throttled one by a quarter."""
FADE = 1 / 100
"""Part of the way back to 1 that factors beside go with each launch that has nothing beside it: a
split that once looked slow would never be tried again. Three times as fast, a predictor that knows
no neighbours was believed anew at the beginning of each split, and 1 to 2% of tokens were late."""
OUTLIER = 2.0
"""A launch that is off by more than this factor tells nothing of the clock: something waited."""


class Corrected:
    """Another predictor's times, times a slow factor for each kind of launch, alone and beside.

    A chip's clock follows its power limit, its temperature and its own voltage, and a profile was
    measured on another chip or another day. Each launch that ended moves the factor of its kind
    towards its own time over the predicted one, by a small part in the logarithm. Factors beside
    fade while nothing runs beside anything.

    Args:
        predictor: The predictor to be corrected.
        rate: Part of the way that a launch moves its factor; 0.02 follows some 50 launches.
        rate_beside: The same for launches with something beside them, which are off by more, and in
            the next launch by almost as much: 5.8% for decode steps beside prompts on an H200, of
            which 0.84 stays.

    Attributes:
        factors: By (kind, whether something ran beside it).

    Raises:
        ArgumentError: a rate outside (0, 1].

    Example:
        >>> from smkern.latency import Size, TablePredictor
        >>> table = TablePredictor.load("qwen3-8b")
        >>> corrected, step = Corrected(table), Size(batch=64, total_kv=64 * 2048)
        >>> slow = 1.1 * table.alone_us(step, 32)
        >>> for _ in range(300):
        ...     corrected.observe(step, 32, slow)
        >>> round(corrected.alone_us(step, 32) / slow, 2)
        1.0
    """

    def __init__(
        self, predictor: Predictor, *, rate: float = 0.02, rate_beside: float = 0.3
    ) -> None:
        for name, value in (("rate", rate), ("rate_beside", rate_beside)):
            if not 0 < value <= 1:
                raise ArgumentError(f"{name}={value}: give a part of the way, above 0, at most 1")
        self.predictor = predictor
        self.factors: dict[tuple[Kind, bool], float] = {}
        self._rates = rate, rate_beside

    def __repr__(self) -> str:
        return f"Corrected({self.predictor!r})"

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it, as this chip is now."""
        return self.predictor.alone_us(size, num_sms) * self._factor(size, False)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """How many times longer it takes beside another launch, as this chip is now; at least 1."""
        ratio = self.predictor.slowdown(size, num_sms, beside, beside_sms)
        return max(1.0, ratio * self._factor(size, True) / self._factor(size, False))

    def worst_us(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """The longest that it may take beside another launch: the predictor's own guard, where it
        has one, as this chip is now."""
        worst = getattr(self.predictor, "worst_us", None)
        if worst is None:
            alone_us = self.alone_us(size, num_sms)
            return alone_us * self.slowdown(size, num_sms, beside, beside_sms)
        return float(worst(size, num_sms, beside, beside_sms)) * self._factor(size, True)

    def observe(
        self, size: Size, num_sms: int, us: float, beside: Size | None = None, beside_sms: int = 0
    ) -> None:
        """Learn from a launch that ended.

        Args:
            size: What it was made of.
            num_sms: SMs of its place.
            us: How long it took on the device.
            beside: What ran beside it all the time; None: nothing did. Launches with something
                beside them for part of their time are better left out.
            beside_sms: SMs of that.
        """
        expected = self.predictor.alone_us(size, num_sms)
        if beside is not None:
            expected *= self.predictor.slowdown(size, num_sms, beside, beside_sms)
        key = size.kind, beside is not None
        if beside is None:
            for kind, is_beside in self.factors:
                if is_beside:
                    self.factors[kind, True] **= 1 - FADE
        factor = self.factors.get(key, 1.0)
        if not (expected > 0 and us > 0 and 1 / OUTLIER <= us / (expected * factor) <= OUTLIER):
            return
        moved = factor * exp(self._rates[beside is not None] * log(us / (expected * factor)))
        self.factors[key] = min(max(moved, LOW), HIGH)

    def _factor(self, size: Size, beside: bool) -> float:
        return self.factors.get((size.kind, beside), 1.0) if self.factors else 1.0
