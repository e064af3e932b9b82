"""Rates that a model's own launches reach on so many SMs, rather than a device's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from smkern.errors import LatencyError
from smkern.latency.cost import Costs
from smkern.latency.curve import Curve
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.profile import Profile


def achieved_rates(
    samples: Iterable[Sample], sizes: ModelSizes, profile: Profile
) -> Callable[[int], tuple[float, float]]:
    """TB/s and TFLOP/s by SMs: the most that launches alone reached.

    On each partition that was measured prompts give the FLOP rate and decode steps the bandwidth;
    between and beyond partitions the share of the profile's ceiling is interpolated over the
    logarithm of SMs.

    Args:
        samples: Measured launches.
        sizes: The model that they are of.
        profile: The device's ceilings.

    Returns:
        The rates of so many SMs.

    Raises:
        LatencyError: no prompts, or no decode step, were measured alone.

    Source: DuetServe section 4.2 profiles "the achievable compute throughput and memory bandwidth
        for each possible SM partition size", and does not say by which kernels.
    """
    costs = Costs(sizes, l2_bytes=profile.info.l2_bytes)
    best: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}}
    for sample in samples:
        if not sample.alone or sample.kind == "mixed":
            continue
        work = costs.of(sample.size)
        done = work.flops if sample.kind == "prefill" else work.bytes_moved
        by_sms = best[sample.kind]
        by_sms[sample.num_sms] = max(by_sms.get(sample.num_sms, 0.0), done / sample.us / 1e6)
    for kind, by_sms in best.items():
        if not by_sms:
            raise LatencyError(
                f"no {kind} was measured alone, so what it reaches is not known; measure some: "
                "smkern profile --model"
            )
    compute, memory = (
        Curve.of(((sms,), rate / ceiling(sms)) for sms, rate in by_sms.items())
        for by_sms, ceiling in (
            (best["prefill"], profile.flops),
            (best["decode"], profile.bandwidth),
        )
    )

    @cache
    def rates(num_sms: int) -> tuple[float, float]:
        return (
            profile.bandwidth(num_sms) * memory.at(num_sms),
            profile.flops(num_sms) * compute.at(num_sms),
        )

    return rates
