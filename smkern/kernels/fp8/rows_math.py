"""The scale of a group of elements, in Triton's language or Gluon's: both decorate this source."""

import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)
NEGLIGIBLE = tl.constexpr(2.0**-100)
MOST = tl.constexpr(448.0)


def _magnitude(x):
    """Bits of |x|, which order like the magnitudes, with infinity and NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


def _scale_of(bits):
    """The scale of a group by its largest magnitude."""
    most = bits.to(tl.float32, bitcast=True)
    scale = tl.where(most < NEGLIGIBLE, 1.0, tl.div_rn(most, MOST + most * 0.0))
    return tl.where(bits < INFINITE, scale, float("nan"))


def _inverse(scale):
    """1 / scale, rounded once."""
    return tl.div_rn(1.0 + scale * 0.0, scale)
