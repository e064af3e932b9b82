"""What GPUs that share a model add to a launch: sums over a ring, by a formula or as measured."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import isfinite

from smkern.errors import ArgumentError
from smkern.latency.cost import ELEMENT_BYTES
from smkern.latency.predictor import Predictor
from smkern.latency.work import Size

SUMS_PER_LAYER = 2
"""Behind attention's output product, and behind the second one of the MLP."""


def ring_us(gpus: int, num_bytes: float, nvlink_tbps: float, startup_us: float) -> float:
    """Time of a sum over a ring of GPUs: 2 (N-1) startup + 2 (N-1)/N B / nvlink."""
    moved = 2 * (gpus - 1) / gpus * num_bytes
    return 2 * (gpus - 1) * startup_us + moved / nvlink_tbps / 1e6


@dataclass(frozen=True, slots=True)
class Ring:
    """Sums over GPUs that share a model evenly.

    Attributes:
        gpus: How many.
        hidden_size: Width of the residual stream.
        vocab_size: Tokens, whose logits all of them have.
        nvlink_tbps: Bandwidth of all links of a GPU in one direction, TB/s.
        startup_us: Time to start one of the ring's steps, microseconds.
        measured: (bytes, microseconds) of sums, ascending by bytes; between them lines, below the
            first its time, beyond the last its bandwidth. Empty: the formula.

    Raises:
        ArgumentError: fewer GPUs than 1, or sizes, bandwidths and times that cannot be.

    Source: DuetServe section 4.1.

    Example:
        >>> from smkern.latency import Ring, Size
        >>> ring = Ring(2, hidden_size=4096, vocab_size=128_256, nvlink_tbps=0.5)
        >>> round(ring.all_reduce_us(512 * 1024), 3)
        7.049
    """

    gpus: int
    hidden_size: int
    vocab_size: int
    nvlink_tbps: float = 0.45
    startup_us: float = 3.0
    measured: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.hidden_size < 1 or self.vocab_size < 1:
            raise ArgumentError(f"{self}: give at least one GPU, and sizes of 1 or more")
        if not self.nvlink_tbps > 0 or not 0 <= self.startup_us < float("inf"):
            raise ArgumentError(
                f"nvlink_tbps={self.nvlink_tbps}, startup_us={self.startup_us}: take a bandwidth "
                "above 0 and a time of 0 or more"
            )
        sizes = [size for size, _ in self.measured]
        if sizes != sorted(set(sizes)) or not all(
            size > 0 and us > 0 and isfinite(size + us) for size, us in self.measured
        ):
            raise ArgumentError(
                f"measured={self.measured!r:.200}: give (bytes, microseconds) above 0, ascending "
                "by bytes"
            )

    def all_reduce_us(self, num_bytes: float) -> float:
        """Time of a sum of so many bytes, microseconds; 0 on one GPU."""
        if self.gpus == 1 or not num_bytes:
            return 0.0
        if not self.measured:
            return ring_us(self.gpus, num_bytes, self.nvlink_tbps, self.startup_us)
        right = bisect_right(self.measured, (num_bytes, float("inf")))
        if right == 0:
            return self.measured[0][1]
        size, us = self.measured[right - 1]
        if right == len(self.measured):
            return us * num_bytes / size
        after, later_us = self.measured[right]
        return us + (num_bytes - size) / (after - size) * (later_us - us)

    def launch_us(self, size: Size) -> float:
        """Time of a launch's sums: two a layer, and where it has a head the embedding's and the
        logits'.

        Args:
            size: What the launch is made of.
        """
        tokens = size.new_tokens + size.batch
        if self.gpus == 1 or not tokens:
            return 0.0
        hidden_us = self.all_reduce_us(ELEMENT_BYTES * tokens * self.hidden_size)
        layers = size.num_layers if size.batch else size.layers
        us = SUMS_PER_LAYER * layers * hidden_us
        if not (size.head or size.batch):
            return us
        rows = size.batch + (len(size.chunks) if size.head else 0)
        return us + hidden_us + self.all_reduce_us(ELEMENT_BYTES * rows * self.vocab_size)


@dataclass(frozen=True, slots=True)
class WithRing(Predictor):
    """A predictor of one GPU's part of a model, and the sums over all of them.

    Attributes:
        part: Prices the part's launches.
        ring: The sums; they neither slow down nor are slowed down by what runs beside.
    """

    part: Predictor
    ring: Ring

    def alone_us(self, size: Size, num_sms: int) -> float:
        return self.part.alone_us(size, num_sms) + self.ring.launch_us(size)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return self.part.slowdown(size, num_sms, beside, beside_sms)
