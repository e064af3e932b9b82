"""Rows that become e4m3: quantising, and norms and SiLU times up that write it. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smkern.device import Budget, check_budget
from smkern.limits import FP8_BLOCK
from smkern.tuning.rows import VECTOR, WHOLE

QuantOp = Literal["quantize", "quantize_by", "rms_norm", "add_rms_norm", "silu_and_mul"]
Group = Literal["tensor", "token", "block", "weight_block"]
"""What shares a scale."""
OutScale = Literal["token", "block"]
"""What shares a scale of an operator's results."""

MAX_CHUNK = 16384
"""Columns that a CTA holds: wider rows are read twice where they have one scale."""
BLOCKS_AT_ONCE = 2048
"""Columns of an item whose blocks have scales of their own."""
RESIDENT = 4
"""CTAs an SM under a mask."""
RESIDENT_BLOCKS = 8
"""Of pieces with scales of blocks: 4 read 4,096 rows 16 to 40% slower."""


@dataclass(frozen=True, slots=True, order=True)
class QuantProblem:
    """One launch over `rows` rows of `width` e4m3.

    `aligned`: rows begin at whole 16 bytes, of e4m3 at whole 8.
    """

    op: QuantOp
    group: Group
    rows: int
    width: int
    dtype: Literal["bf16", "fp16"] = "bf16"
    weight_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    aligned: bool = True

    @property
    def is_norm(self) -> bool:
        return self.op in ("rms_norm", "add_rms_norm")


@dataclass(frozen=True, slots=True, order=True)
class QuantConfig:
    """`block`: columns of an item. `ctas_per_sm` and `pdl` apply under a mask only."""

    num_warps: int
    block: int
    ctas_per_sm: int = RESIDENT
    pdl: bool = True


def chunk_of(problem: QuantProblem) -> int:
    """Columns of an item: a power of two."""
    padded = 1 << max(0, problem.width - 1).bit_length()
    if problem.is_norm:
        return max(padded, WHOLE)
    if problem.group == "weight_block":
        return FP8_BLOCK
    if problem.group == "token":
        return min(max(padded, WHOLE), MAX_CHUNK)
    return min(max(padded, WHOLE), BLOCKS_AT_ONCE)


def choose(problem: QuantProblem, budget: Budget) -> QuantConfig:
    """Warps for 16 elements a thread, 32 in the widest norms.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    block = chunk_of(problem)
    elements = block * (FP8_BLOCK if problem.group == "weight_block" else 1)
    warps = min(16, max(4, elements // (32 * 2 * VECTOR)))
    pieces = not problem.is_norm and problem.group == "block"
    return QuantConfig(warps, block, RESIDENT_BLOCKS if pieces else RESIDENT)


def num_items(problem: QuantProblem, config: QuantConfig) -> int:
    """Work items: rows, tiles, or pieces of rows."""
    across = -(-problem.width // config.block)
    if problem.is_norm or problem.group == "token":
        return problem.rows
    if problem.group == "weight_block":
        return -(-problem.rows // FP8_BLOCK) * across
    return problem.rows * across


def num_ctas(problem: QuantProblem, config: QuantConfig, budget: Budget) -> int:
    """CTAs of a launch: at most one an item, and one an SM without a mask."""
    return max(1, min(budget.most_ctas(config.ctas_per_sm), num_items(problem, config)))
