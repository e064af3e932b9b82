"""The least time of a launch's kernels, those that bytes bound and those that FLOPs bound apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from smkern.latency.cost import ATTENTION, ELEMENT_BYTES, Kernel, Load, kernels_of
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.sizes import ModelSizes
from smkern.latency.work import Size
from smkern.profile import Profile


class Bound(NamedTuple):
    """One of a launch's kernels, all its layers together.

    Attributes:
        bytes_us: Its bytes over the bandwidth of the SMs.
        flops_us: Its FLOPs over their rate.
    """

    bytes_us: float
    flops_us: float


class Roofline:
    """What a device allows a model's launches.

    Args:
        sizes: The model.
        profile: The device: bandwidth and FLOP rate by SMs.
        rates: TB/s and TFLOP/s of so many SMs; None: the profile's bandwidth, and a FLOP rate
            proportional to SMs.
        gemms: Times of the model's GEMMs.
        like: Of another model on the device: its times of GEMMs over their rooflines hold for this
            one.

    Attributes:
        num_layers, num_q_heads: Of the model.
        num_sms: Of the device.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        profile: Profile,
        *,
        rates: Callable[[int], tuple[float, float]] | None = None,
        gemms: GemmTimes | None = None,
        like: Roofline | None = None,
    ) -> None:
        self._sizes = sizes
        self.num_layers = sizes.num_layers
        self.num_q_heads = sizes.q_size // sizes.head_dim
        self._profile = profile
        self.num_sms = profile.info.num_sms
        self._gemms = gemms
        self._like = like
        self._key = next(k for k in self._kernels(Load(0, 0, 1, 1), 1) if k.name == ATTENTION)
        """Attention's costs in a layer, of one key and of one pair."""
        products = [k.product for k in self._kernels(Load(1, 0, 0, 0), 1)]
        weights = [product.n * product.k for product in products if product is not None]
        self._behind_attention = 1 - weights[0] / sum(weights)
        """The part of a layer's products that is behind attention, by their weights."""
        # Steps of one batch differ by their keys, which attention alone reads.
        self._others: Callable[[int, int, int, int, bool], tuple[Bound, ...]]
        self._others = lru_cache(maxsize=4096)(self._list_others)
        self._rates: Callable[[int], tuple[float, float]]
        self._rates = lru_cache(maxsize=None)(rates or self._read_rates)

    def bounds(self, size: Size, num_sms: int) -> tuple[Bound, ...]:
        """A launch's kernels."""
        load = Load.of(size)
        layers = self.num_layers if size.batch else size.layers
        others = self._others(load.tokens, load.rows, layers, num_sms, load.ends)
        fixed, by_key = self.attention(load.tokens, layers, num_sms)
        moved = fixed + load.keys * by_key.bytes_us
        return (*others, Bound(moved, load.pairs * by_key.flops_us))

    def tbps(self, num_sms: int) -> float:
        """What so many SMs read of memory, TB/s."""
        return self._rates(num_sms)[0]

    @property
    def knows_gemms(self) -> bool:
        """Whether times of the model's GEMMs are known."""
        return self._gemms is not None or (self._like is not None and self._like.knows_gemms)

    def others_us(
        self, tokens: int, rows: int, layers: int, num_sms: int, ends: bool = False
    ) -> float:
        """All kernels but attention, of so many tokens and rows of logits: the GEMMs' own times
        where they are known, which go up a stair with the tokens, else all rooflines. `ends`: the
        last layer computes the rows of logits alone behind attention."""
        if (gemms := self._gemms) is not None:
            self._rates(num_sms)  # refuses more SMs than there are
            us = gemms.us(tokens, rows, layers, num_sms)
            if ends:
                left = gemms.us(rows, 0, 1, num_sms) if rows else 0.0
                us -= self._behind_attention * (gemms.us(tokens, 0, 1, num_sms) - left)
            return us
        us = sum(max(bound) for bound in self._others(tokens, rows, layers, num_sms, ends))
        like = self._like
        if like is None or not us:
            return us
        layers, theirs = like.num_layers, like._profile.info.num_sms
        at = max(1, round(num_sms * theirs / self._profile.info.num_sms))
        known = like.others_us(tokens, rows, layers, at)
        return us * known / sum(max(x) for x in like.others(tokens, rows, layers, at))

    def others(self, tokens: int, rows: int, layers: int, num_sms: int) -> tuple[Bound, ...]:
        """All kernels but attention, of so many tokens and rows of logits."""
        return self._others(tokens, rows, layers, num_sms, False)

    def attention(self, tokens: int, layers: int, num_sms: int) -> tuple[float, Bound]:
        """What attention moves without a key, and what it takes for each key and each pair, us."""
        tbps, tflops = self._rates(num_sms)
        key, bytes_us, flops_us = self._key, layers / tbps / 1e6, layers / tflops / 1e6
        # queries and what it writes, where they exceed the L2
        moved = ELEMENT_BYTES * 2 * tokens * self._sizes.q_size
        fixed = bytes_us * moved if moved > self._profile.info.l2_bytes else 0.0
        return fixed, Bound(bytes_us * key.bytes_moved, flops_us * key.flops)

    def _list_others(
        self, tokens: int, rows: int, layers: int, num_sms: int, ends: bool
    ) -> tuple[Bound, ...]:
        kernels = self._kernels(Load(tokens, rows, 0, 0, ends), layers)
        return tuple(self._bound(k, num_sms) for k in kernels if k.name != ATTENTION)

    def _kernels(self, load: Load, layers: int) -> tuple[Kernel, ...]:
        return kernels_of(self._sizes, load, l2_bytes=self._profile.info.l2_bytes, layers=layers)

    def _bound(self, kernel: Kernel, num_sms: int) -> Bound:
        tbps, tflops = self._rates(num_sms)
        return Bound(
            kernel.count * kernel.bytes_moved / tbps / 1e6,
            kernel.count * kernel.flops / (kernel.flop_rate * tflops) / 1e6,
        )

    def _read_rates(self, num_sms: int) -> tuple[float, float]:
        """TB/s and TFLOP/s of so many SMs; what power takes from many is left to what is measured
        over it, for between two measured counts neither of both is a line."""
        return self._profile.bandwidth(num_sms), num_sms * self._profile.flops(1)
