"""Bullet's SM-scaling roofline with measured factors, and decode's bandwidth beside prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from smkern.errors import LatencyError, ProfileError
from smkern.latency.cost import Load
from smkern.latency.curve import Curve
from smkern.latency.roofline import Bound, Roofline
from smkern.latency.sample import Sample
from smkern.latency.scaling import ScalingRates
from smkern.latency.sizes import ModelSizes
from smkern.latency.work import Kind, Size
from smkern.profile import Profile

_LEAST_SHARE = 0.05
"""Of its bandwidth that decode is thought to keep beside prefill."""


class Bullet:
    """The sum of each kernel's roofline on N_p SMs, times a factor that was measured.

        T' = sum of flop / min(flop/mem D_p, C_p), alpha = measured / T', T = alpha T'

    C_p and D_p are `ScalingRates` of the profile. Factors are sampled at states: SMs with decode
    rows and keys of a row, or new tokens and keys that a token sees; beside a neighbour also its
    new tokens, or its decode rows. Between states a factor is interpolated over the logarithms
    (`Curve`), one coordinate after the other.

    A decode step beside prompts of sl new tokens has the bandwidth D_{p,sl} that decode steps were
    measured to have on so many SMs beside prompts of about sl tokens, and a factor of its own for
    what this leaves; prompts beside decode rows have factors alone.

    Deviations: D_{p,sl} is what explains the mean of the sampled decode steps, not a copy measured
    beside an up-gate product; where no step was measured beside prompts it is the profile's
    bandwidth beside a product, whatever sl; factors are interpolated, and kept beyond the samples,
    not extrapolated; a forward of prompts and decode rows, which Bullet never launches, has factors
    as prompts, or of its own where some were measured; nothing is refined online; all-reduces of
    GPUs that share a model are a `Ring`'s.

    Args:
        samples: Measured launches, alone and beside each other.
        sizes: The model.
        profile: The device.

    Raises:
        LatencyError: no sample of a launch alone.

    Source: Bullet section 3.2.
    """

    def __init__(self, samples: Iterable[Sample], sizes: ModelSizes, profile: Profile) -> None:
        samples = list(samples)
        self._sizes, self._profile = sizes, profile
        self._scaling = ScalingRates.of(profile)
        self._roofline = Roofline(sizes, profile, rates=self._rates)
        # Steps of one batch differ by their keys, which attention alone reads.
        self._parts: Callable[[int, int, int, int, float], _Parts]
        self._parts = lru_cache(maxsize=4096)(self._sum_parts)
        self._share: Callable[[int, int], float] = lru_cache(maxsize=4096)(self._find_share)
        self._shares = Curve((), ())
        self._alone = self._fit_alone([sample for sample in samples if sample.alone])
        beside = [sample for sample in samples if sample.beside is not None]
        decode = [s for s in beside if s.kind == "decode" and s.beside and s.beside.chunks]
        prefill = [s for s in beside if s.kind == "prefill" and s.beside and s.beside.batch]
        self._shares = self._fit_shares(decode)
        self._decode_beside = _curve(self._beside_point(sample) for sample in decode)
        self._prefill_beside = _curve(self._beside_point(sample) for sample in prefill)

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it.

        Args:
            size: What it is made of; its `num_layers` are those of the predictor's model.
            num_sms: SMs of its place.

        Returns:
            Microseconds; 0 for a launch of nothing.

        Raises:
            LatencyError: no launch of this kind was measured alone.
            ProfileError: more SMs than the device has.
        """
        if not size.chunks and not size.batch:
            return 0.0
        return self._factor(size, num_sms) * self._scaled_us(size, num_sms, 1.0)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """How many times longer a launch takes while another runs on other SMs; at least 1.

        1 for what Bullet does not run beside each other: two launches of one phase.
        """
        if size.chunks:
            if not beside.batch or not self._prefill_beside:
                return 1.0
            factor = self._prefill_beside.at(*_point(size, num_sms), beside.batch)
            return max(1.0, factor / self._factor(size, num_sms))
        if not size.batch or not beside.chunks:
            return 1.0
        tokens = beside.new_tokens
        longer = self._scaled_us(size, num_sms, self._share(num_sms, tokens))
        longer /= self._scaled_us(size, num_sms, 1.0)
        if self._decode_beside:
            factor = self._decode_beside.at(*_point(size, num_sms), tokens)
            longer *= factor / self._factor(size, num_sms)
        return max(1.0, longer)

    def _scaled_us(self, size: Size, num_sms: int, share: float) -> float:
        """T' with a share of the bandwidth."""
        if size.chunks:
            tokens, rows, keys, pairs, _ = Load.of(size)
            layers = self._sizes.num_layers if size.batch else size.layers
        else:
            tokens = rows = size.batch
            keys = pairs = size.total_kv
            layers = self._sizes.num_layers
        parts = self._parts(tokens, rows, layers, num_sms, share)
        attention_us = max(parts.activations_us + keys * parts.key_us, pairs * parts.pair_us)
        return parts.others_us + attention_us

    def _sum_parts(self, tokens: int, rows: int, layers: int, num_sms: int, share: float) -> _Parts:
        others = self._roofline.others(tokens, rows, layers, num_sms)
        activations_us, one = self._roofline.attention(tokens, layers, num_sms)
        return _Parts(
            _sum_us(others, share), activations_us / share, one.bytes_us / share, one.flops_us
        )

    def _rates(self, num_sms: int) -> tuple[float, float]:
        if not 1 <= num_sms <= self._scaling.num_sms:
            raise ProfileError(
                f"num_sms={num_sms} is outside {self._profile.info.name}: take 1 to "
                f"{self._scaling.num_sms}"
            )
        return self._scaling.memory(num_sms), self._scaling.compute(num_sms)

    def _factor(self, size: Size, num_sms: int) -> float:
        factors = self._alone.get(size.kind)
        if factors is None and size.kind == "mixed":
            factors = self._alone.get("prefill")
        if factors is None:
            raise LatencyError(
                f"no {size.kind} was measured alone, so its factor is not known; measure some: "
                "smkern profile --model"
            )
        return factors.at(*_point(size, num_sms))

    def _fit_alone(self, samples: list[Sample]) -> dict[Kind, Curve]:
        points: dict[Kind, list[tuple[tuple[float, ...], float]]] = {}
        for sample in samples:
            point = _point(sample.size, sample.num_sms)
            factor = sample.us / self._scaled_us(sample.size, sample.num_sms, 1.0)
            points.setdefault(sample.kind, []).append((point, factor))
        if not points:
            raise LatencyError(
                "no launch was measured alone, so no factor is known; measure some: "
                "smkern profile --model"
            )
        return {kind: _curve(found) for kind, found in points.items()}

    def _fit_shares(self, samples: list[Sample]) -> Curve:
        """Decode's share of its bandwidth, by SMs and the neighbour's tokens to a power of 2."""
        points = []
        for sample in samples:
            assert sample.beside is not None
            rounded = 1 << (sample.beside.new_tokens - 1).bit_length()
            points.append(((sample.num_sms, rounded), self._solve(sample)))
        return _curve(points)

    def _solve(self, sample: Sample) -> float:
        """The share of its bandwidth with which a decode step takes as long as it did."""
        wanted = sample.us / self._factor(sample.size, sample.num_sms)
        bounds = self._roofline.bounds(sample.size, sample.num_sms)
        low, high = _LEAST_SHARE, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            if _sum_us(bounds, middle) > wanted:
                low = middle
            else:
                high = middle
        return high

    def _find_share(self, num_sms: int, tokens: int) -> float:
        if self._shares:
            return self._shares.at(num_sms, tokens)
        alone = self._profile.bandwidth(num_sms)
        return min(1.0, self._profile.bandwidth(num_sms, beside=True) / alone)

    def _beside_point(self, sample: Sample) -> tuple[tuple[float, ...], float]:
        size, num_sms, beside = sample.size, sample.num_sms, sample.beside
        assert beside is not None
        if size.chunks:
            neighbour, share = beside.batch, 1.0
        else:
            neighbour, share = beside.new_tokens, self._share(num_sms, beside.new_tokens)
        point = (*_point(size, num_sms), neighbour)
        return point, sample.us / self._scaled_us(size, num_sms, share)


class _Parts(NamedTuple):
    """A launch's least time but for attention, and attention's: for its activations, a key, and a
    pair, microseconds."""

    others_us: float
    activations_us: float
    key_us: float
    pair_us: float


def _point(size: Size, num_sms: int) -> tuple[float, float, float]:
    """A launch's state: SMs, decode rows, keys of each; or SMs, all tokens, keys that one sees."""
    if not size.chunks:
        return num_sms, size.batch, size.total_kv / size.batch
    tokens = pairs = 0
    for new, cached in size.chunks:
        tokens += new
        pairs += new * (new + 2 * cached)
    return num_sms, tokens + size.batch, (pairs / 2 + size.total_kv) / (tokens + size.batch)


def _curve(points: Iterable[tuple[tuple[float, ...], float]]) -> Curve:
    """Through points, those at one place by their mean."""
    groups: dict[tuple[float, ...], list[float]] = {}
    for point, value in points:
        groups.setdefault(point, []).append(value)
    return Curve.of((point, sum(group) / len(group)) for point, group in groups.items())


def _sum_us(bounds: tuple[Bound, ...], share: float) -> float:
    return sum(max(bound.bytes_us / share, bound.flops_us) for bound in bounds)
