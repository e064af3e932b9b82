"""Operators on e4m3 matrices: products with scales, and what writes e4m3."""

from smkern.ops.fp8.quantize import quantize

__all__ = ["quantize"]
