"""Times of prompts and of mixed forwards alone, between those that were measured."""

from __future__ import annotations

from collections.abc import Mapping

from smkern.latency.curve import Curve
from smkern.latency.roofline import Bound, Roofline
from smkern.latency.step_times import KEPT, UNMEASURED, StepTimes
from smkern.latency.table import Timing
from smkern.latency.work import Size

_LOWEST, _HIGHEST = 0.05, 50.0
"""Between which a prompt's time over its roofline is sought."""


class PromptTimes:
    """Prompts take the sum over kernels of max(r_d bytes, r_p FLOPs).

    r_d is what the largest decode steps take over their roofline, r_p follows from cells of prompts
    by SMs and new tokens. A mixed forward takes at least what its decode rows take alone; cells of
    mixed forwards correct it by SMs, all its rows and its decode rows.

    Args:
        cells: Times with nothing beside them, us; decode steps are passed over.
        roofline: Of the model on the device.
        steps: Its decode steps.
    """

    def __init__(self, cells: Mapping[Timing, float], roofline: Roofline, steps: StepTimes) -> None:
        self._roofline, self._steps = roofline, steps
        self._kept: dict[tuple[int, int, int, int, int], _Forward] = {}
        self._prompts, self._mixed = Curve((), ()), Curve((), ())
        layers = roofline.num_layers
        # In this order: mixed forwards are told from prompts.
        self._prompts = Curve.of(
            (
                (key.num_sms, key.prompts * key.tokens),
                self._solve(key.size(layers), key.num_sms, us),
            )
            for key, us in cells.items()
            if key.kind == "prefill"
        )
        mixed = [
            (
                (key.num_sms, key.prompts * key.tokens + key.batch, key.batch),
                us / self.us(key.size(layers), key.num_sms),
            )
            for key, us in cells.items()
            if key.kind == "mixed"
        ]
        self._kept.clear()
        self._mixed = Curve.of(mixed)

    def over(self, roofline: Roofline, steps: StepTimes) -> PromptTimes:
        """The same times over another model's roofline."""
        other = PromptTimes({}, roofline, steps)
        other._prompts, other._mixed = self._prompts, self._mixed
        return other

    def us(self, size: Size, num_sms: int) -> float:
        """Time of a launch that has chunks."""
        us, batch = self._forward(size, num_sms).us(size), size.batch
        if not batch:
            return us
        us = max(us, self._steps.us(num_sms, batch, size.total_kv))
        if self._mixed:
            # by all its rows: it goes up a stair wherever they fill one more tile
            us *= self._mixed.at(num_sms, size.new_tokens + batch, batch)
        return us

    def attention_share(self, size: Size, num_sms: int) -> float:
        """Attention's part of the time of prompts' layers."""
        forward = self._forward(size, num_sms)
        return forward.attention_us(size) / forward.us(size)

    def _forward(self, size: Size, num_sms: int) -> _Forward:
        new, rows, batch = 0, len(size.chunks) if size.head else 0, size.batch
        for chunk in size.chunks:
            new += chunk[0]
        layers = self._roofline.num_layers if batch else size.layers
        key = num_sms, new, batch, rows + batch, layers
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            r_p = self._prompts.at(num_sms, new) if self._prompts else UNMEASURED
            r_d = self._steps.over_bytes(num_sms)
            found = self._kept[key] = _Forward(self._roofline, key, r_d, r_p)
        return found

    def _solve(self, size: Size, num_sms: int, us: float) -> float:
        """The r_p with which prompts take so long."""
        bounds = self._roofline.bounds(size, num_sms)
        r_d = self._steps.over_bytes(num_sms)
        low, high = _LOWEST, _HIGHEST
        for _ in range(60):
            middle = (low + high) / 2
            if _sum_us(bounds, r_d, middle) < us:
                low = middle
            else:
                high = middle
        return high


class _Forward:
    """What is the same of all forwards of so many tokens and rows on so many SMs."""

    __slots__ = ("_fixed", "_key_us", "_pair_us", "others_us")

    def __init__(
        self, roofline: Roofline, key: tuple[int, int, int, int, int], r_d: float, r_p: float
    ) -> None:
        num_sms, new, batch, rows, layers = key
        tokens = new + batch
        self.others_us = _sum_us(roofline.others(tokens, rows, layers, num_sms), r_d, r_p)
        fixed, by_key = roofline.attention(tokens, rows, layers, num_sms)
        self._fixed = r_d * fixed
        self._key_us, self._pair_us = r_d * by_key.bytes_us, r_p * by_key.flops_us

    def us(self, size: Size) -> float:
        return self.others_us + self.attention_us(size)

    def attention_us(self, size: Size) -> float:
        keys = pairs = size.total_kv
        new: int
        cached: int
        for new, cached in size.chunks:
            keys += cached + new
            pairs += new * cached + new * (new + 1) // 2
        moved, computed = self._fixed + self._key_us * keys, self._pair_us * pairs
        return moved if moved > computed else computed


def _sum_us(bounds: tuple[Bound, ...], bytes_ratio: float, flops_ratio: float) -> float:
    return sum(max(bytes_ratio * bound.bytes_us, flops_ratio * bound.flops_us) for bound in bounds)
