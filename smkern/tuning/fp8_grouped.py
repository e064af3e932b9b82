"""The grouped GEMM of e4m3: problem and configuration. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.device import Budget, check_budget
from smkern.tuning.config import Dtype

BLOCK_K = 128
FEW, SOME = 16, 64
"""Rows of an expert up to which a tile is no higher."""


@dataclass(frozen=True, slots=True, order=True)
class ScaledGroupedProblem:
    """out [rows, n] = (a [rows, k] @ w[expert]^T), scaled; with `swiglu` w[expert] is [2n, k].

    `aligned`: rows of a and w begin at whole 16 bytes.
    """

    rows: int
    num_experts: int
    n: int
    k: int
    swiglu: bool = False
    out_dtype: Dtype = "bf16"
    blocks: bool = False
    aligned: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.n * self.k * (1 + self.swiglu)

    @property
    def bytes_moved(self) -> float:
        """Active experts' weights and all rows read once, the output written."""
        active = self.num_experts * (1 - (1 - 1 / self.num_experts) ** self.rows)
        return (active * self.n * (1 + self.swiglu) + self.rows) * self.k + 2 * self.rows * self.n


@dataclass(frozen=True, slots=True, order=True)
class ScaledGroupedConfig:
    """Tiles of block_m rows by block_n output columns; `ctas_per_sm` under a mask only."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    pdl: bool = True


CONFIGS = (ScaledGroupedConfig(16, 64, 4, 4, 3), ScaledGroupedConfig(64, 64, 8, 4, 2))
"""By height."""


def choose(problem: ScaledGroupedProblem, budget: Budget) -> ScaledGroupedConfig:
    """The lower tile while experts have few rows in the mean; it depends on the rows alone.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    return CONFIGS[problem.rows > FEW * problem.num_experts]


def num_ctas(problem: ScaledGroupedProblem, config: ScaledGroupedConfig, budget: Budget) -> int:
    """CTAs of a launch: no more than tiles there can be."""
    tiles_n = -(-problem.n // config.block_n)
    rows = min(problem.rows, problem.num_experts + problem.rows // config.block_m)
    return max(1, min(budget.most_ctas(config.ctas_per_sm), rows * tiles_n))
