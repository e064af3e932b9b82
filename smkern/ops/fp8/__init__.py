"""Operators on e4m3 matrices: products with scales, and what writes e4m3.

The families that these belong to call them, and they share the families' checks: whichever is
imported first, the families come before.
"""

import smkern.ops.gemm
import smkern.ops.moe
import smkern.ops.rows  # noqa: F401
from smkern.ops.fp8.quantize import quantize
from smkern.ops.fp8.warmup import Fp8Calls

__all__ = ["Fp8Calls", "quantize"]
