"""What GPUs that share a model add to a launch: sums over a ring, by a formula or as measured."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from smkern.errors import ArgumentError
from smkern.latency.cost import ELEMENT_BYTES
from smkern.latency.predictor import Predictor
from smkern.latency.work import Size
from smkern.limits import as_float, as_int, shown

SUMS_PER_LAYER = 2
"""Behind attention's output product, and behind the second one of the MLP."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Sums over GPUs that share a model evenly: 2 (N-1) startup + 2 (N-1)/N B / nvlink.

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
        for name in ("gpus", "hidden_size", "vocab_size"):
            as_int(name, getattr(self, name), 1, 2**31)
        if not 0 < as_float("nvlink_tbps", self.nvlink_tbps) < inf:
            raise ArgumentError(f"nvlink_tbps={self.nvlink_tbps}: take a bandwidth above 0")
        if not 0 <= as_float("startup_us", self.startup_us) < inf:
            raise ArgumentError(f"startup_us={self.startup_us}: take a finite time of 0 or more")
        try:
            points = [(float(size), float(us)) for size, us in self.measured]
            is_right = all(0 < x < inf for point in points for x in point)
            is_ascending = all(a[0] < b[0] for a, b in pairwise(points))
        except Exception:  # noqa: BLE001  of whatever stands for points
            is_right = is_ascending = False
        if not (is_right and is_ascending):
            raise ArgumentError(
                f"measured={shown(self.measured)}: give (bytes, microseconds) above 0, ascending "
                "by bytes"
            )

    def all_reduce_us(self, num_bytes: float) -> float:
        """Time of a sum of so many bytes, microseconds; 0 on one GPU."""
        if self.gpus == 1 or not num_bytes:
            return 0.0
        if not self.measured:
            steps = 2 * (self.gpus - 1)
            moved = steps / self.gpus * num_bytes
            return steps * self.startup_us + moved / self.nvlink_tbps / 1e6
        right = bisect_right(self.measured, (num_bytes, inf))
        if right == 0:
            return self.measured[0][1]
        size, us = self.measured[right - 1]
        if right == len(self.measured):
            return us * num_bytes / size
        after, later_us = self.measured[right]
        return us + (num_bytes - size) / (after - size) * (later_us - us)

    def launch_us(self, size: Size) -> float:
        """Time of a launch's sums, two a layer, and where it has a head the embedding's, and of its
        logits, which are gathered: a sum's second half.

        Args:
            size: What the launch is made of.
        """
        tokens = size.new_tokens + size.batch
        if self.gpus == 1 or not tokens:
            return 0.0
        hidden_us = self.all_reduce_us(ELEMENT_BYTES * tokens * self.hidden_size)
        layers = size.num_layers if size.batch else size.layers
        us = SUMS_PER_LAYER * (layers - size.ends) * hidden_us
        if not (size.head or size.batch):
            return us
        rows = size.batch + (len(size.chunks) if size.head else 0)
        if size.ends:
            us += SUMS_PER_LAYER * self.all_reduce_us(ELEMENT_BYTES * rows * self.hidden_size)
        logits_us = self.all_reduce_us(ELEMENT_BYTES * rows * self.vocab_size) / 2
        return us + hidden_us + logits_us


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
