"""Times as they come on a GPU: around what is predicted."""

from __future__ import annotations

from math import exp, sqrt
from random import Random

from smkern.latency import Size
from smkern.latency.predictor import Predictor

SPREAD = 0.04
"""Standard deviation of a launch with prompts about its prediction, as a share: on three H200s
p10 / p50 / p90 of mixed forwards were 0.89 to 0.93 / 0.95 to 0.99 / 1.04 to 1.08 of it. One size's
have 1.8%, most of which stays in the next step, and sizes are off by the rest; but with launches
that vary so, replays were further from a GPU's than with each drawn anew."""
OF_STEPS = 0.5
"""Part of it that decode steps have."""
OF_SLOWDOWNS, KEPT = 1.35, 0.9
"""What the slowdown of decode steps beside prompts has of it, and how much of one factor is in the
next: such steps on an H200 were off by 5.8%, and by 0.84 of that in the step that followed."""


class Varied:
    """A predictor whose times vary from launch to launch, for a simulated device.

    What a policy asks stays the prediction. Each answer is one launch's time, by a log-normal
    factor of median 1; that of slowdowns of decode steps changes slowly.

    Args:
        predictor: Of times.
        spread: Standard deviation of the factor's logarithm, of launches with prompts.
        pace: How many times as long as predicted all launches take, beside what varies.

    Example:
        >>> from smkern.latency import Size, TablePredictor
        >>> table, step = TablePredictor.load("qwen3-8b"), Size(batch=64, total_kv=64 * 2048)
        >>> varied = Varied(table, 0.04)
        >>> ratios = [varied.alone_us(step, 32) / table.alone_us(step, 32) for _ in range(1000)]
        >>> 0.97 < sorted(ratios)[100] < 0.98
        True
    """

    def __init__(self, predictor: Predictor, spread: float = SPREAD, *, pace: float = 1.0) -> None:
        self._predictor = predictor
        self._spread = spread
        self._pace = pace
        self._draw = Random(0)
        self._off = 0.0

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of the next launch with nothing beside it."""
        spread = self._spread if size.chunks else OF_STEPS * self._spread
        us = self._pace * self._predictor.alone_us(size, num_sms)
        return us * exp(self._draw.gauss(0.0, spread))

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """How many times longer a launch takes beside another; at least 1."""
        slow = self._predictor.slowdown(size, num_sms, beside, beside_sms)
        if size.chunks:
            return slow
        fresh = self._draw.gauss(0.0, OF_SLOWDOWNS * self._spread)
        self._off = KEPT * self._off + sqrt(1.0 - KEPT**2) * fresh
        return max(1.0, slow * exp(self._off))
