"""DuetServe's attention-aware roofline."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from smkern.latency.cost import ELEMENT_BYTES
from smkern.latency.formulas import Work, linear
from smkern.latency.sizes import ModelSizes
from smkern.latency.work import Size
from smkern.profile import Profile

NORM_FLOPS = 4
"""A number's: squared, summed, scaled and weighted."""
GATE_FLOPS = 4
"""A number's of the gate: exponential, sum, quotient, and times up."""


class DuetServe:
    """Each operator's FLOPs over a partition's rate or its bytes over the bandwidth, the longer.

        linear(n, d_i, d_o): F = 2 n d_i d_o, B = (n d_i + d_i d_o + n d_o) s
        attention, for each request of q new and c cached tokens:
            F = 4 h_q q (q+c) d_h + 2 h_q q (q+c), B = 2 h_q q d_h s + 2 h_kv (q+c) d_h s
        total = L (sum of max(F / rate(S), B / bandwidth(S))) + classifier

    Nothing is fitted: rate and bandwidth are the ceilings that the profile has of S SMs, or what
    `rates` says. There is no term for contention. What the text leaves open: QKV is one product of
    three times the hidden width and the gate and up one of twice the inner one, as with each once a
    model would have two thirds of its weights and decode could not be overpredicted, as Figure 8
    has it; a norm and the gate count four FLOPs a number. `corrected` mends the formulas:

    - attention computes the causal half of its pairs;
    - keys and values are as wide as their heads (grouped), not as the hidden width;
    - a head's dimension is the model's own, not hidden width / heads;
    - the classifier reads the last token of each request, not all.

    Deviations: decode rows count as equally long, which is exact where memory bounds all of them; a
    mixture of experts, which the paper does not have, moves the experts that some token is expected
    to choose. All-reduces of GPUs that share a model are a `Ring`'s, and each one's part is that of
    `ModelSizes.sharded`, `corrected`.

    Args:
        sizes: The model.
        profile: The device: bandwidth and FLOP rate by SMs.
        corrected: With the formulas mended.
        rates: TB/s and TFLOP/s of so many SMs, such as `achieved_rates`; None: the profile's.

    Source: DuetServe section 4.1.

    Example:
        >>> from smkern.latency.sizes import ModelSizes
        >>> from smkern.models import preset
        >>> from smkern.profile import load_profile
        >>> roofline = DuetServe(ModelSizes.of(preset("qwen3-8b")), load_profile("h200"))
        >>> step = Size(batch=64, total_kv=64 * 2048)
        >>> roofline.alone_us(step, 16) > 1.3 * roofline.alone_us(step, 132)
        True
    """

    def __init__(
        self,
        sizes: ModelSizes,
        profile: Profile,
        *,
        corrected: bool = False,
        rates: Callable[[int], tuple[float, float]] | None = None,
    ) -> None:
        self._corrected = corrected
        self._num_layers = sizes.num_layers
        self._profile = profile
        self._rates = rates or self._ceilings
        self._sizes = sizes
        self._masked = 0.5 if corrected else 0.0
        self._heads = sizes.q_size // sizes.head_dim
        self._kv_heads = sizes.kv_size // sizes.head_dim
        self._head_dim = sizes.head_dim if corrected else sizes.hidden_size / self._heads
        self._block_us = lru_cache(maxsize=4096)(self._sum_block)
        self._classifier_us = lru_cache(maxsize=4096)(self._price_classifier)
        self._attention_us = lru_cache(maxsize=None)(self._price_attention)

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it.

        Args:
            size: What it is made of.
            num_sms: SMs of its place.

        Returns:
            Microseconds; 0 for a launch of nothing.

        Raises:
            ProfileError: more SMs than the device has.
        """
        tokens = size.new_tokens + size.batch
        if not tokens:
            return 0.0
        pair_us, query_us, key_us = self._attention_us(num_sms)
        us = 0.0
        for new, cached in size.chunks:
            keys = new + cached
            pairs = new * keys - self._masked * new * (new - 1)
            us += max(pairs * pair_us, new * query_us + keys * key_us)
        if size.batch:
            batch, keys = size.batch, size.total_kv
            us += max(keys * pair_us, batch * query_us + keys * key_us)
        layers = self._num_layers if size.batch else size.layers
        us = layers * (us + self._block_us(tokens, num_sms))
        if not (size.head or size.batch):
            return us
        if self._corrected:
            tokens = size.batch + (len(size.chunks) if size.head else 0)
        return us + self._classifier_us(tokens, num_sms)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """1: the paper's model has no term for contention."""
        return 1.0

    def _price_attention(self, num_sms: int) -> tuple[float, float, float]:
        """Of a pair's FLOPs, and of the bytes of a query with its output and of a key with its
        value, in one layer."""
        tbps, tflops = self._rates(num_sms)
        element_us = 2 * ELEMENT_BYTES * self._head_dim / tbps / 1e6
        pair_us = 2 * self._heads * (2 * self._head_dim + 1) / tflops / 1e6
        return pair_us, self._heads * element_us, self._kv_heads * element_us

    def _sum_block(self, tokens: int, num_sms: int) -> float:
        """A block's operators that depend on the number of tokens alone."""
        hidden, (tbps, tflops) = self._sizes.hidden_size, self._rates(num_sms)
        norm = _elementwise(tokens * hidden, NORM_FLOPS, 2)
        works = [*self._projections(tokens), *_feed_forward(self._sizes, tokens), norm, norm]
        return sum(work.us(tbps, tflops) for work in works)

    def _price_classifier(self, tokens: int, num_sms: int) -> float:
        sizes = self._sizes
        return linear(tokens, sizes.hidden_size, sizes.vocab_size).us(*self._rates(num_sms))

    def _projections(self, tokens: int) -> tuple[Work, Work]:
        sizes, hidden = self._sizes, self._sizes.hidden_size
        if self._corrected:
            return linear(tokens, hidden, sizes.qkv_size), linear(tokens, sizes.q_size, hidden)
        return linear(tokens, hidden, 3 * hidden), linear(tokens, hidden, hidden)

    def _ceilings(self, num_sms: int) -> tuple[float, float]:
        return self._profile.bandwidth(num_sms), self._profile.flops(num_sms)


def _feed_forward(sizes: ModelSizes, tokens: int) -> list[Work]:
    hidden, moe = sizes.hidden_size, sizes.moe
    if moe is None:
        inner = sizes.intermediate_size
        gate = _elementwise(tokens * inner, GATE_FLOPS, 3)
        return [linear(tokens, hidden, 2 * inner), gate, linear(tokens, inner, hidden)]
    inner, rows = moe.intermediate_size, tokens * moe.top_k
    chosen = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
    return [
        linear(tokens, hidden, moe.num_experts),
        _experts(rows, hidden, 2 * inner, chosen),
        _elementwise(rows * inner, GATE_FLOPS, 3),
        _experts(rows, inner, hidden, chosen),
    ]


def _experts(rows: int, d_in: int, d_out: int, chosen: float) -> Work:
    elements = rows * (d_in + d_out) + chosen * d_in * d_out
    return Work(2 * rows * d_in * d_out, ELEMENT_BYTES * elements)


def _elementwise(numbers: int, flops: int, moved: int) -> Work:
    return Work(flops * numbers, ELEMENT_BYTES * moved * numbers)
