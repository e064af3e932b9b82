"""What a forward pass must move and compute, kernel by kernel, and the least time that takes.

A kernel's floor is the larger of its bytes over the partition's measured bandwidth and its FLOPs
over 8.1 TFLOP/s times the SMs, in fp8 twice that; a step's is the sum. What is moved and computed
is counted by `smkern.latency.cost`; a floor that let a decode step's activations off-chip would be
too easy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smkern.bench.gemm_rows import TFLOPS_PER_SM
from smkern.latency.cost import Kernel, Load, visible_pairs
from smkern.profile import Profile


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
    def load(self) -> Load:
        """Its tokens and keys; the head computes the last token of each request."""
        keys = self.batch * self.kv_len
        return Load(self.tokens, self.batch, keys, self.pairs, ends=self.q_len > 1)


def kernel_floor_us(kernel: Kernel, tbps: float, num_sms: int, clock: float = 1.0) -> float:
    """The least time of one launch, us; `clock`: the SMs' share of the full one."""
    tflops = kernel.flop_rate * TFLOPS_PER_SM * num_sms * clock
    return max(kernel.bytes_moved / tbps, kernel.flops / tflops) / 1e6


def floor_us(kernels: Iterable[Kernel], tbps: float, num_sms: int, clock: float = 1.0) -> float:
    """The least time of all launches, us.

    Args:
        kernels: launches, from `smkern.latency.cost.kernels_of`.
        tbps: the partition's measured read bandwidth.
        num_sms: the partition's SMs.
        clock: their clock, as a share of the full one.
    """
    return sum(kernel.count * kernel_floor_us(kernel, tbps, num_sms, clock) for kernel in kernels)


def beside_floor_us(
    kernels: Iterable[Kernel], profile: Profile, num_sms: int, sm_mhz: float | None = None
) -> float:
    """The least time of all launches beside a prompt's products on the other SMs, us.

    Args:
        kernels: launches, from `smkern.latency.cost.kernels_of`.
        profile: the device's ceilings: what a reader gets there.
        num_sms: the partition's SMs.
        sm_mhz: the clock that they had; the full one where it was not read.
    """
    clock = 1.0 if sm_mhz is None else sm_mhz / profile.info.sm_clock_mhz
    return floor_us(kernels, profile.bandwidth(num_sms, beside=True), num_sms, clock)
