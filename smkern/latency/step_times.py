"""Times of decode steps alone, between those that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

from smkern.latency.curve import Curve, Filled
from smkern.latency.roofline import Roofline
from smkern.latency.table import Timing

UNMEASURED = 1.25
"""Time over the roofline, where no cell of a kind says more: what decode steps take on 48 SMs."""
KEPT = 1 << 14
"""Answers that are kept; then all are forgotten."""
PIECE = 512
"""Keys of a piece of attention's decode path; the last of a request's is half full in the mean."""
DRAWN = 1e-2
"""Weight of the usual, in squares of attention's share of steps that differ by their keys."""
TELLING = 5e-2
"""Squares that tell attention's factor: where only short requests were timed, there are fewer, and
steps of 10,000 keys a request on 20 SMs were told 11% too long by them."""
SM_TBPS = 0.145
"""Keys and values that decode attention takes in on one SM at most, TB/s."""
FROM_MEMORY = 1.03
"""Time of decode attention over its bytes' where memory alone limits it."""
UNREAD = 0.5
"""What keys that a last piece lacks cost of memory's time; of an SM's they cost all."""
OTHERS_DRAWN = 1e-2
"""Weight of `UNMEASURED`, in squares of the share of a step that is not attention."""
UNTUNED = 1.08
"""Time over what the cost model says of GEMMs in a partition whose rows are no power of two: nobody
tuned them, and the best of many predictions is too good. cuBLAS serves those of a whole device."""


class StepTimes:
    """A step takes c times its GEMMs and what goes with them, and r_a times attention's roofline.

    c by SMs and rows and r_a by SMs follow from the cells, and what is left by SMs, rows and keys.
    Between two counts each is linear in the logarithm; beyond the cells the nearest one's holds.
    Where no two cells differ by their keys alone, c counts for attention, too. Lengths whose mean
    is no multiple of a piece are taken to end anywhere in one.

    Args:
        cells: Times of decode steps with nothing beside them, us; other cells are passed over.
        roofline: Of the model on the device.
    """

    def __init__(self, cells: Mapping[Timing, float], roofline: Roofline) -> None:
        self._roofline = roofline
        self._steps: dict[tuple[int, int], _Step] = {}
        self._others, self._attention, self._rest = Filled([]), Curve((), ()), Curve((), ())
        steps = [(key, us) for key, us in cells.items() if key.kind == "decode"]
        self._attention = Curve.of(_attention_over(steps, roofline))
        self._others = Filled(self._others_over(steps))
        self._steps.clear()
        self._rest = Curve.of(
            (
                (key.num_sms, key.batch, key.context),
                us / self.us(key.num_sms, key.batch, key.batch * key.context),
            )
            for key, us in steps
        )
        self._steps.clear()

    def over(self, roofline: Roofline) -> StepTimes:
        """The same times over another model's roofline."""
        other = StepTimes({}, roofline)
        other._others, other._attention, other._rest = self._others, self._attention, self._rest
        return other

    def us(self, num_sms: int, batch: int, total_kv: int) -> float:
        """Time of a step; 0 without a row.

        Args:
            num_sms: SMs.
            batch: Rows.
            total_kv: Keys that they read together.
        """
        return self._step(num_sms, batch).us(total_kv) if batch else 0.0

    def attention_us(self, num_sms: int, batch: int, total_kv: int) -> float:
        """Attention's part of it."""
        if not batch:
            return 0.0
        step = self._step(num_sms, batch)
        return step.attention_over * step.attention.us(batch, total_kv)

    def _others_over(
        self, steps: Iterable[tuple[Timing, float]]
    ) -> list[tuple[tuple[float, float], float]]:
        """c by SMs and rows, the mean of their cells; one that is mostly attention tells little."""
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for key, us in steps:
            step, total_kv = self._step(key.num_sms, key.batch), key.batch * key.context
            attention_us = step.attention.us(key.batch, total_kv)
            over, weight = us / (step.others_us + attention_us), 1.0
            if self._attention:
                over = (us - step.attention_over * attention_us) / step.others_us
                weight = (step.others_us / us) ** 2
            total, weights = found.get((key.num_sms, key.batch), (0.0, 0.0))
            found[key.num_sms, key.batch] = total + weight * over, weights + weight
        drawn = OTHERS_DRAWN if self._attention else 0.0
        return [
            (at, max((total + drawn * UNMEASURED) / (weights + drawn), 0.5))
            for at, (total, weights) in found.items()
        ]

    def _step(self, num_sms: int, batch: int) -> _Step:
        found = self._steps.get((num_sms, batch))
        if found is None:
            if len(self._steps) >= KEPT:
                self._steps.clear()
            found = self._steps[num_sms, batch] = self._make(num_sms, batch)
        return found

    def _make(self, num_sms: int, batch: int) -> _Step:
        roofline = self._roofline
        others_us = roofline.others_us(batch, batch, roofline.num_layers, num_sms)
        is_tuned = batch <= 16 or not batch & (batch - 1)
        if roofline.knows_gemms and not is_tuned and num_sms < roofline.num_sms:
            others_us *= UNTUNED
        over = self._others.at(num_sms, batch) if self._others else UNMEASURED
        attention = self._attention.at(num_sms) if self._attention else over
        rest = self._rest.slice(num_sms).slice(batch) if self._rest else self._rest
        found = Attention(roofline, num_sms, batch)
        return _Step(batch, others_us, over * others_us, found, attention, rest)


class Attention:
    """What attention takes in steps of so many rows: what memory needs for their keys, and an SM's
    loads in flight for their pieces, blended."""

    __slots__ = ("_fixed", "_key_us", "_piece_us")

    def __init__(self, roofline: Roofline, num_sms: int, batch: int) -> None:
        layers = roofline.num_layers
        fixed, by_key = roofline.attention(batch, layers, num_sms)
        self._fixed = FROM_MEMORY * fixed
        key_us = max(by_key)  # a decode row sees all of its keys
        self._key_us = FROM_MEMORY * key_us
        self._piece_us = key_us * roofline.tbps(num_sms) / (SM_TBPS * num_sms)

    def us(self, batch: int, total_kv: int) -> float:
        """Of a step of so many keys."""
        unread = 0
        if total_kv % (PIECE * batch):
            unread = min(total_kv, PIECE * batch) // 2
        memory = self._fixed + self._key_us * (total_kv + UNREAD * unread)
        flight = self._piece_us * (total_kv + unread)
        memory *= memory
        flight *= flight
        return sqrt(sqrt(memory * memory + flight * flight))


@dataclass(slots=True, eq=False)
class _Step:
    """What is the same of all steps of so many rows on so many SMs."""

    _batch: int
    others_us: float
    _fixed_us: float
    attention: Attention
    attention_over: float
    rest: Curve

    def us(self, total_kv: int) -> float:
        batch = self._batch
        us = self._fixed_us + self.attention_over * self.attention.us(batch, total_kv)
        return us * self.rest.at(total_kv / batch) if self.rest else us


def _attention_over(
    steps: Iterable[tuple[Timing, float]], roofline: Roofline
) -> list[tuple[tuple[float], float]]:
    """r_a over the usual, by SMs: how much longer steps take that differ by their keys alone.

    Least squares, drawn to the usual. SMs whose steps say little are left out, unless all are.
    """
    groups: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for key, us in steps:
        attention = Attention(roofline, key.num_sms, key.batch)
        attention_us = attention.us(key.batch, key.batch * key.context)
        groups.setdefault(key.num_sms, {}).setdefault(key.batch, []).append((attention_us, us))
    found = []
    for num_sms, by_batch in groups.items():
        both = squares = 0.0
        for points in by_batch.values():
            weights = [1 / us**2 for _, us in points]
            total = sum(weights)
            x = sum(w * a for w, (a, _) in zip(weights, points, strict=True)) / total
            y = sum(w * us for w, (_, us) in zip(weights, points, strict=True)) / total
            both += sum(w * (a - x) * (us - y) for w, (a, us) in zip(weights, points, strict=True))
            squares += sum(w * (a - x) ** 2 for w, (a, _) in zip(weights, points, strict=True))
        if squares:
            over = (both + DRAWN) / (squares + DRAWN)
            found.append((squares, ((float(num_sms),), min(max(over, 0.5), 2.0))))
    least = min(TELLING, max((squares for squares, _ in found), default=0.0))
    return [point for squares, point in found if squares >= least]
