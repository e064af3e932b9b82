"""Keys of attention's tuned cells.

A cell's key has the sizes that a model fixes, the budget, and power-of-two buckets of what varies
by step: number of requests, longest query, mean number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from smkern.device import Confinement
from smkern.tuning.attention import constraints
from smkern.tuning.attention.constraints import AttentionPath
from smkern.tuning.attention.shapes import (
    DECODE_MAX_Q,
    AttentionDtype,
    AttentionProblem,
    Budget,
    CacheDtype,
)
from smkern.tuning.bucket_table import Key, power_of_two

OP = "paged_attention"


@dataclass(frozen=True, slots=True, order=True)
class AttentionKey(Key):
    """Key of a tuned cell."""

    op: str
    path: AttentionPath
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: AttentionDtype
    cache_dtype: CacheDtype
    batch: int
    q_len: int
    kv_len: int
    num_sms: int
    confined: Confinement

    BUCKETED = ("batch", "q_len", "kv_len")

    @classmethod
    def of(cls, problem: AttentionProblem, budget: Budget) -> Self:
        shape = problem.shape
        return cls(
            OP, constraints.path_of(shape), shape.num_q_heads, shape.num_kv_heads, shape.head_dim,
            shape.page_size, problem.dtype, problem.cache_dtype, power_of_two(shape.batch),
            power_of_two(shape.max_q_len), power_of_two(mean_kv_len(problem)),
            budget.num_sms, budget.confined,
        )  # fmt: skip


def mean_kv_len(problem: AttentionProblem) -> int:
    """Upper bound of the mean keys per request, within the window."""
    shape = problem.shape
    mean = min(shape.max_kv_len, -(-shape.max_total_kv // max(shape.batch, 1)))
    seen = shape.window + min(shape.max_q_len, DECODE_MAX_Q) if shape.window else mean
    return max(1, min(mean, seen))
