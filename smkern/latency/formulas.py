"""FLOPs and bytes of the operators that the papers' models count."""

from __future__ import annotations

from typing import NamedTuple

from smkern.latency.cost import ELEMENT_BYTES


class Work(NamedTuple):
    """What an operator computes and moves."""

    flops: float
    bytes_moved: float

    def us(self, tbps: float, tflops: float) -> float:
        """The longer of its bytes over TB/s and its FLOPs over TFLOP/s, microseconds."""
        return max(self.bytes_moved / tbps, self.flops / tflops) / 1e6


def linear(n: float, d_in: int, d_out: int) -> Work:
    """A product of `n` tokens: 2 n d_in d_out FLOPs; its input, weights and output once each.

    Args:
        n: Tokens.
        d_in: Columns of the input.
        d_out: Columns of the product.
    """
    return Work(2 * n * d_in * d_out, ELEMENT_BYTES * (n * d_in + d_in * d_out + n * d_out))
