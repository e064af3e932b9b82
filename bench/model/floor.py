"""What a forward pass must move and compute, kernel by kernel, and the least time that takes.

A kernel's floor is the larger of its bytes over the partition's measured bandwidth and its FLOPs
over 8.1 TFLOP/s times the SMs; a step's is the sum. What is moved and computed is counted by
`smkern.latency.cost`; a floor that let a decode step's activations off-chip would be too easy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.bench.gemm_rows import TFLOPS_PER_SM
from smkern.latency import cost
from smkern.latency.cost import Kernel, total_bytes, total_flops, visible_pairs

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

__all__ = [
    "Forward",
    "Kernel",
    "floor_us",
    "kernel_floor_us",
    "kernels_of",
    "total_bytes",
    "total_flops",
]


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass of `batch` equal requests.

    `q_len` new tokens each; `kv_len` keys each, the new ones included.
    """

    batch: int
    q_len: int
    kv_len: int

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs under a causal mask."""
        return self.batch * visible_pairs(self.q_len, self.kv_len)

    @property
    def load(self) -> cost.Load:
        """Its tokens and keys; the head computes the last token of each request."""
        return cost.Load(self.tokens, self.batch, self.batch * self.kv_len, self.pairs)


def kernel_floor_us(kernel: Kernel, tbps: float, num_sms: int) -> float:
    """The least time of one launch, us."""
    return max(kernel.bytes_moved / tbps, kernel.flops / (TFLOPS_PER_SM * num_sms)) / 1e6


def floor_us(kernels: Iterable[Kernel], tbps: float, num_sms: int) -> float:
    """The least time of all launches, us.

    Args:
        kernels: of `kernels_of`.
        tbps: the partition's measured read bandwidth.
        num_sms: the partition's SMs.
    """
    return sum(kernel.count * kernel_floor_us(kernel, tbps, num_sms) for kernel in kernels)


def kernels_of(config: ModelConfig, forward: Forward, *, l2_bytes: int) -> tuple[Kernel, ...]:
    """The operators of one forward pass, in the order in which a layer launches them.

    Args:
        config: the model.
        forward: its requests; the head computes the last token of each.
        l2_bytes: of the device; a kernel's activations up to so many are not off-chip traffic.
    """
    return cost.kernels_of(config, forward.load, l2_bytes=l2_bytes)
