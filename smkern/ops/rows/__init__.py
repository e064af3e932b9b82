"""Operators over rows: RMS norm, its sum with a residual, SiLU times up, rows of a table."""

from smkern.ops.rows.operators import add_rms_norm, embedding, rms_norm, silu_and_mul
from smkern.ops.rows.warmup import RowsCalls

__all__ = ["RowsCalls", "add_rms_norm", "embedding", "rms_norm", "silu_and_mul"]
