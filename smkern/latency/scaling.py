"""Rates of a device by SMs as two lines each: they grow with SMs, then stay."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.errors import ArgumentError
from smkern.profile import Profile


@dataclass(frozen=True, slots=True)
class ScalingRates:
    """Compute that is proportional to SMs, and bandwidth that is until it saturates.

        C_p = C N_p / N, D_p = D min(1, N_p / N_d)

    Attributes:
        num_sms: SMs of the device, N.
        tflops: Its dense rate, C.
        tbps: Its memory bandwidth, D.
        memory_sms: SMs that saturate it, N_d.

    Source: Bullet section 3.2.2, equation 1.

    Example:
        >>> rates = ScalingRates(num_sms=108, tflops=312, tbps=2, memory_sms=30)
        >>> rates.memory(54), rates.memory(15), rates.compute(54)
        (2.0, 1.0, 156.0)
    """

    num_sms: int
    tflops: float
    tbps: float
    memory_sms: int

    def __post_init__(self) -> None:
        rates = (self.tflops, self.tbps)
        if not min(rates) > 0 or not 1 <= self.memory_sms <= self.num_sms:
            raise ArgumentError(
                f"rates {rates} are above 0, and SMs that saturate the bandwidth, "
                f"{self.memory_sms}, 1 to {self.num_sms}"
            )

    @classmethod
    def of(cls, profile: Profile) -> ScalingRates:
        """From a profile's curves: peaks as measured, N_d with which the two lines fit best."""
        total = profile.info.num_sms
        measured = [profile.bandwidth(sms) for sms in range(1, total + 1)]
        peak = max(measured)

        def error(memory_sms: int) -> float:
            lines = (peak * min(1.0, sms / memory_sms) for sms in range(1, total + 1))
            return sum((line / x - 1) ** 2 for line, x in zip(lines, measured, strict=True))

        memory_sms = min(range(1, total + 1), key=error)
        return cls(total, profile.flops(total), peak, memory_sms)

    def compute(self, num_sms: int) -> float:
        """TFLOP/s of so many SMs."""
        return self.tflops * num_sms / self.num_sms

    def memory(self, num_sms: int) -> float:
        """TB/s of so many SMs from memory."""
        return self.tbps * min(1.0, num_sms / self.memory_sms)
