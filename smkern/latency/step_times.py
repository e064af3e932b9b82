"""Times of decode steps alone, between those that were measured."""

from __future__ import annotations

from collections.abc import Mapping

from smkern.latency.curve import Curve
from smkern.latency.roofline import Roofline
from smkern.latency.table import Timing

UNMEASURED = 1.25
"""Time over the roofline, where no cell of a kind says more: what decode steps take on 48 SMs."""
LARGE = 1e9
"""Rows or keys beyond all that is timed."""
KEPT = 1 << 14
"""Answers that are kept; then all are forgotten."""


class StepTimes:
    """A step's time over its roofline, by SMs, rows and keys of each.

    Between two counts of SMs or rows, and of keys, it is linear in the logarithm; beyond the cells
    the nearest one's holds, so that steps outside grow as their roofline does.

    Args:
        cells: Times of decode steps with nothing beside them, us; other cells are passed over.
        roofline: Of the model on the device.
    """

    def __init__(self, cells: Mapping[Timing, float], roofline: Roofline) -> None:
        self._roofline = roofline
        self._steps: dict[tuple[int, int], _Step] = {}
        self._curve = Curve((), ())
        steps = [(key, us) for key, us in cells.items() if key.kind == "decode"]
        self._curve = Curve.of(
            (
                (key.num_sms, key.batch, key.context),
                us / self.roofline_us(key.num_sms, key.batch, key.batch * key.context),
            )
            for key, us in steps
        )
        self._steps.clear()

    def over(self, roofline: Roofline) -> StepTimes:
        """The same times over another model's roofline."""
        other = StepTimes({}, roofline)
        other._curve = self._curve
        return other

    def us(self, num_sms: int, batch: int, total_kv: int) -> float:
        """Time of a step; 0 without a row.

        Args:
            num_sms: SMs.
            batch: Rows.
            total_kv: Keys that they read together.
        """
        if not batch:
            return 0.0
        step = self._step(num_sms, batch)
        over = step.over.at(total_kv / batch) if step.over else UNMEASURED
        return over * step.roofline_us(total_kv)

    def attention_us(self, num_sms: int, batch: int, total_kv: int) -> float:
        """Attention's part of it."""
        if not batch:
            return 0.0
        step = self._step(num_sms, batch)
        over = step.over.at(total_kv / batch) if step.over else UNMEASURED
        return over * (step.roofline_us(total_kv) - step.others_us)

    def roofline_us(self, num_sms: int, batch: int, total_kv: int) -> float:
        """What it takes at least."""
        return self._step(num_sms, batch).roofline_us(total_kv)

    def over_bytes(self, num_sms: int) -> float:
        """Time over the roofline of the largest step: what weights take that are read once."""
        return self._curve.at(num_sms, LARGE, LARGE) if self._curve else UNMEASURED

    def _step(self, num_sms: int, batch: int) -> _Step:
        found = self._steps.get((num_sms, batch))
        if found is None:
            if len(self._steps) >= KEPT:
                self._steps.clear()
            found = self._steps[num_sms, batch] = _Step(self._roofline, self._curve, num_sms, batch)
        return found


class _Step:
    """What is the same of all steps of so many rows on so many SMs."""

    __slots__ = ("_fixed", "_key_bytes", "_key_flops", "others_us", "over")

    def __init__(self, roofline: Roofline, curve: Curve, num_sms: int, batch: int) -> None:
        layers = roofline.num_layers
        bounds = roofline.others(batch, batch, layers, num_sms)
        self.others_us = sum(max(bound) for bound in bounds)
        self._fixed, by_key = roofline.attention(batch, batch, layers, num_sms)
        self._key_bytes, self._key_flops = by_key
        self.over = curve.slice(num_sms).slice(batch) if curve else curve

    def roofline_us(self, total_kv: int) -> float:
        moved = self._fixed + self._key_bytes * total_kv
        # a decode row sees all of its keys
        computed = self._key_flops * total_kv
        return self.others_us + (moved if moved > computed else computed)
