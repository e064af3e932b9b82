"""The grouped GEMM of e4m3: problem and configurations. Pure, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from smkern.device import Budget as Budget
from smkern.device import check_budget
from smkern.tuning import fp8
from smkern.tuning.config import Dtype
from smkern.tuning.grouped import GroupedConfig, GroupedKernel

if TYPE_CHECKING:
    from smkern.profile import Profile

BLOCK_K = 128
FEW, SOME = 16, 32
"""Rows of an expert in the mean up to which a tile is no higher."""
MANY_EXPERTS = 256
"""Up to so many the copying warp keeps where tiles end in as few registers as in the GEMM."""


@dataclass(frozen=True, slots=True, order=True)
class ScaledGroupedProblem:
    """out [rows, n] = (a [rows, k] @ w[expert]^T), scaled; with `swiglu` w[expert] is [2n, k].

    `aligned`: rows of a and w begin at whole 16 bytes. `mapped`: rows of out do too, w's experts
    follow each other, and the gate's blocks of scales end where the up rows begin. Strides, in
    elements of matrices and of scales, matter to the launch only.
    """

    rows: int
    num_experts: int
    n: int
    k: int
    swiglu: bool = False
    out_dtype: Dtype = "bf16"
    blocks: bool = False
    aligned: bool = True
    mapped: bool = True
    a_stride: int = 0
    w_stride: int = 0
    expert_stride: int = 0
    out_stride: int = 0
    a_step: int = 0
    a_block_step: int = 0
    w_step: int = 0
    w_expert_step: int = 0

    @property
    def halves(self) -> int:
        """Weight rows per output column."""
        return 1 + self.swiglu


_STEP = fp8.STEP
_GATED = (
    GroupedConfig("ws", 16, 64, _STEP, 4, 4, True, 3),
    GroupedConfig("ws", 32, 64, _STEP, 4, 5, True, 2),
    GroupedConfig("ws", 128, 128, _STEP, 8, 4),
)
_PLAIN = (
    GroupedConfig("ws", 16, 128, _STEP, 8, 5, True, 2),
    GroupedConfig("ws", 32, 64, _STEP, 4, 8, True, 2),
    GroupedConfig("ws", 128, 128, _STEP, 8, 6),
)
_POINTER = (
    GroupedConfig("pointer", 16, 64, BLOCK_K, 4, 4, ctas_per_sm=3),
    GroupedConfig("pointer", 64, 64, BLOCK_K, 8, 4, ctas_per_sm=2),
)


def kernel_of(problem: ScaledGroupedProblem, capability: int) -> GroupedKernel:
    """ws needs sm_90's warpgroup instructions, and what tensor maps can read."""
    return "ws" if problem.mapped and capability // 10 == 9 else "pointer"


def configs_of(problem: ScaledGroupedProblem, capability: int) -> tuple[GroupedConfig, ...]:
    """All configurations with kernels for this kind of problem, by height."""
    if kernel_of(problem, capability) == "pointer":
        return _POINTER
    return _GATED if problem.swiglu else _PLAIN


def choose(problem: ScaledGroupedProblem, budget: Budget, capability: int) -> GroupedConfig:
    """The lower tile while experts have few rows in the mean; it depends on the rows alone.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    made, mean = configs_of(problem, capability), problem.rows / problem.num_experts
    return made[min((mean > FEW) + (mean > SOME), len(made) - 1)]


def selector(profile: Profile) -> Callable[[ScaledGroupedProblem, Budget], GroupedConfig]:
    """`choose` for a device."""
    return partial(choose, capability=profile.info.sm)


def num_ctas(problem: ScaledGroupedProblem, config: GroupedConfig, budget: Budget) -> int:
    """CTAs of a launch: no more than tiles there can be."""
    tiles_n = -(-problem.n // config.block_n)
    rows = min(problem.rows, problem.num_experts + problem.rows // config.block_m)
    return max(1, min(budget.most_ctas(config.ctas_per_sm), rows * tiles_n))


def copy_registers(num_experts: int) -> int:
    """Registers of the copying warp's threads, which hold where every expert's tiles end."""
    return fp8.COPY_REGISTERS if num_experts <= MANY_EXPERTS else 40
