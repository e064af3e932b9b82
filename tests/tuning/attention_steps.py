"""Steps of attention to choose for, and a cell's budget and configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget

DECODE = AttentionShape(64, 32, 8, 128, 16, 1, 4096, 64, 64 * 4096)
BUDGET = Budget(32, "mask", False)
TWO = AttentionConfig("cuda", teams=2)


def problem_of(
    shape: AttentionShape = DECODE, dtype: Any = "bf16", cache_dtype: Any = "bf16", **changes: Any
) -> AttentionProblem:
    return AttentionProblem(replace(shape, **changes), dtype, cache_dtype)


def decode_of(batch: int, length: int, **changes: Any) -> AttentionProblem:
    """One new token of each request, all of one length."""
    sizes = {"max_tokens": batch, "max_kv_len": length, "max_total_kv": batch * length}
    return problem_of(batch=batch, **sizes | changes)
