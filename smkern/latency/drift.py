"""DRIFT's latency model: regressions of either phase alone, and nothing for contention."""

from __future__ import annotations

from smkern.latency.solo import SoloRun
from smkern.latency.work import Size


class Drift(SoloRun):
    """Per-partition regressions of prefill and decode, contention left out.

    The paper finds that prompts beside decode rows contend little, for all their kernels but
    decode's attention are bound by compute; so a launch beside another
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

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """1, as beside nothing."""
        return 1.0
