"""DRIFT's latency model: regressions of either phase alone, and nothing for contention."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.latency.formulas import Work, linear
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.solo import SoloRun
from smkern.latency.work import Size


class Drift:
    """Per-partition regressions of prefill and decode, contention left out.

    The paper finds that prompts beside decode rows contend little, for all their kernels but
    decode's attention are bound by compute (`memory_over_compute`); so a launch beside another
    takes what it takes alone. Deviations are those of `SoloRun`.

    Args:
        samples: Measured launches, of which those alone are used.

    Raises:
        LatencyError: no partition determines the coefficients of prefill, or of decode.

    Source: DRIFT section 3.4.

    Example:
        >>> from smkern.latency import Chunk, Size
        >>> from smkern.latency.sample import Sample
        >>> lengths = [(1000, 0), (2000, 0), (4000, 0), (1000, 4000), (2000, 2000)]
        >>> prompts = [Size((Chunk(n, r),), 1, 1, True) for n, r in lengths]
        >>> steps = [Size(batch=b, total_kv=r) for b, r in [(1, 500), (8, 9000), (64, 64000)]]
        >>> us = lambda size: 20.0 * size.new_tokens + 10 * size.batch + size.total_kv / 10 + 5
        >>> drift = Drift([Sample(size, 100, us(size)) for size in prompts + steps])
        >>> round(drift.alone_us(Size((Chunk(3000),), 1, 1, True), 100))
        60005
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._solo = SoloRun(samples)

    def alone_us(self, size: Size, num_sms: int) -> float:
        """As `SoloRun.alone_us`."""
        return self._solo.alone_us(size, num_sms)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """1, as beside nothing."""
        return 1.0


def memory_over_compute(
    sizes: ModelSizes,
    *,
    tflops: float,
    tbps: float,
    batch: int = 256,
    new: int = 1024,
    cached: int = 8192,
    context: int = 1024,
) -> dict[str, float]:
    """Each kernel's least time for its memory over that for its FLOPs; above 1 memory bounds it.

    Only two kernels that memory bounds contend much where each has SMs of its own (Principle 1).
    Attention counts its queries, keys and values once, and every pair of the square.

    Args:
        sizes: The model, or a GPU's part of it.
        tflops: Dense rate of the GPU, TFLOP/s.
        tbps: Its memory bandwidth, TB/s.
        batch: Decode rows, for all but prefill attention.
        new: New tokens of the prompt.
        cached: Tokens in front of them.
        context: Cached keys of each decode row.

    Source: DRIFT section 3.4, Table 2.

    Example:
        >>> from smkern.latency.sizes import ModelSizes
        >>> from smkern.models import preset
        >>> ratios = memory_over_compute(ModelSizes.of(preset("qwen3-8b")), tflops=989, tbps=4.8)
        >>> [name for name, ratio in ratios.items() if ratio > 1]
        ['decode_attention']
    """
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    works = {
        "qkv": linear(batch, hidden, sizes.qkv_size),
        "o": linear(batch, sizes.q_size, hidden),
        # the gate and up are multiplied in the product's epilogue, which writes half
        "gate_up": linear(batch, hidden, 2 * inner, written=inner),
        "down": linear(batch, inner, hidden),
        "prefill_attention": _attention(sizes, 1, new, cached),
        "decode_attention": _attention(sizes, batch, 1, context),
    }
    return {name: (work.bytes_moved / tbps) / (work.flops / tflops) for name, work in works.items()}


def _attention(sizes: ModelSizes, rows: int, new: int, cached: int) -> Work:
    keys = new + cached
    elements = new * sizes.q_size + 2 * keys * sizes.kv_size
    return Work(4 * rows * new * keys * sizes.q_size, 2 * rows * elements)
