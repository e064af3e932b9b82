"""The grouped GEMM: problem, candidates and cost model.

The host knows the total number of rows, not each expert's: configurations are chosen for rows
distributed over the experts at random. A row's bits depend on the configuration, hence on the
number of rows and the budget; given the configuration, only on the row and its expert.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil, erf, exp, sqrt
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from smkern.device import Budget as Budget
from smkern.device import Confinement
from smkern.tuning.attention.shapes import AttentionDtype
from smkern.tuning.bucket_table import Key
from smkern.tuning.family import BucketFamily

if TYPE_CHECKING:
    from smkern.profile import Profile

GroupedKernel = Literal["ws", "pointer"]


@dataclass(frozen=True, slots=True, order=True)
class GroupedProblem:
    """out [rows, n] = a [rows, k] @ w[expert]^T; with `swiglu` w[expert] is [2n, k].

    `aligned`: a, w and out have 16-byte rows and bases, and w's experts are contiguous. Strides, in
    elements, matter to the launch only.
    """

    rows: int
    num_experts: int
    n: int
    k: int
    swiglu: bool = False
    dtype: AttentionDtype = "bf16"
    aligned: bool = True
    a_stride: int = 0
    w_stride: int = 0
    expert_stride: int = 0
    out_stride: int = 0

    @property
    def halves(self) -> int:
        """Weight rows per output column."""
        return 2 if self.swiglu else 1

    @property
    def active(self) -> float:
        """Expected number of experts with a row, for rows distributed at random."""
        return self.num_experts * (1 - (1 - 1 / self.num_experts) ** self.rows)

    @property
    def bytes_moved(self) -> float:
        """Active experts' weights and all rows read once, the output written."""
        weights = self.active * self.halves * self.n * self.k
        return 2 * (weights + self.rows * (self.k + self.n))


@dataclass(frozen=True, slots=True, order=True)
class GroupedConfig:
    """One way to run a grouped GEMM.

    Tiles are block_m rows by block_n output columns. `swap`: weights on the matrix unit's row side.
    `ctas_per_sm` and `pdl` (start while the previous kernel still runs) apply under a mask only.
    `eager`: release a stage when its product is done, not a step later. `tails` (with `swap`): an
    expert's last rows are multiplied as a half or a quarter of a tile if they fit.
    """

    kernel: GroupedKernel = "ws"
    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 3
    swap: bool = False
    ctas_per_sm: int = 1
    eager: bool = False
    tails: bool = False
    pdl: bool = True


_STREAMING = {"swap": True, "eager": True}
_GATED = (
    GroupedConfig("ws", 16, 64, 128, 4, 6, **_STREAMING),
    GroupedConfig("ws", 16, 64, 64, 4, 6, ctas_per_sm=2, **_STREAMING),
    GroupedConfig("ws", 32, 64, 128, 4, 5, **_STREAMING),
    GroupedConfig("ws", 32, 64, 64, 4, 5, ctas_per_sm=2, **_STREAMING),
    GroupedConfig("ws", 64, 64, 128, 4, 4, **_STREAMING),
    GroupedConfig("ws", 64, 64, 64, 4, 4, ctas_per_sm=2, **_STREAMING),
    GroupedConfig("ws", 128, 64, 64, 4, 6, swap=True, tails=True),
    GroupedConfig("ws", 128, 128, 64, 8, 4, swap=True, tails=True),
    GroupedConfig("ws", 128, 128, 64, 8, 4),
    GroupedConfig("ws", 256, 64, 64, 8, 4),
)
_PLAIN = (
    GroupedConfig("ws", 16, 128, 128, 4, 6, **_STREAMING),
    GroupedConfig("ws", 16, 64, 128, 4, 5, ctas_per_sm=2, **_STREAMING),
    GroupedConfig("ws", 32, 128, 128, 4, 5, **_STREAMING),
    GroupedConfig("ws", 32, 64, 128, 4, 4, ctas_per_sm=2, **_STREAMING),
    GroupedConfig("ws", 64, 128, 128, 4, 4, **_STREAMING),
    GroupedConfig("ws", 64, 64, 64, 4, 6, ctas_per_sm=2, **_STREAMING),
    GroupedConfig("ws", 128, 128, 64, 4, 6, swap=True, tails=True),
    GroupedConfig("ws", 128, 256, 64, 8, 4, swap=True, tails=True),
    GroupedConfig("ws", 256, 128, 64, 8, 4, swap=True, tails=True),
    GroupedConfig("ws", 128, 256, 64, 8, 4),
    GroupedConfig("ws", 256, 128, 64, 8, 4),
)
_POINTER = (
    GroupedConfig("pointer", 16, 64, 32, 4, 4),
    GroupedConfig("pointer", 64, 64, 32, 8, 4),
    GroupedConfig("pointer", 128, 64, 32, 8, 3),
)


def kernel_of(problem: GroupedProblem, capability: int) -> GroupedKernel:
    """ws needs sm_90's warpgroup instructions and rows of whole 16 bytes."""
    return "ws" if problem.aligned and capability // 10 == 9 else "pointer"


def configs_of(problem: GroupedProblem, capability: int) -> tuple[GroupedConfig, ...]:
    """All configurations with kernels for this kind of problem.

    The first call of a kind loads all of their kernels, so that no other size or budget compiles.
    """
    if kernel_of(problem, capability) == "pointer":
        return _POINTER
    return _GATED if problem.swiglu else _PLAIN


def is_legal(problem: GroupedProblem, config: GroupedConfig, capability: int) -> bool:
    """Whether a kernel exists for a configuration, whatever its overlap and CTAs per SM."""
    wanted = _code(config)
    return any(
        _code(made) == wanted and 1 <= config.ctas_per_sm <= made.ctas_per_sm
        for made in configs_of(problem, capability)
    )


_code = attrgetter(
    *(item.name for item in fields(GroupedConfig) if item.name not in ("ctas_per_sm", "pdl"))
)


def most_tiles(problem: GroupedProblem, config: GroupedConfig) -> int:
    """Upper bound of the tiles, however the rows are distributed."""
    experts = min(problem.rows, problem.num_experts)
    row_tiles = experts + (problem.rows - experts) // config.block_m
    return row_tiles * -(-problem.n // config.block_n)


def num_ctas(problem: GroupedProblem, config: GroupedConfig, budget: Budget) -> int:
    """CTAs of a launch: at most one per tile, and one per SM without a mask."""
    most = budget.most_ctas(config.ctas_per_sm)
    return max(1, min(most, most_tiles(problem, config)))


@lru_cache(maxsize=4096)
def row_tiles(rows: int, num_experts: int, block: int) -> float:
    """Expected tiles of `block` rows, for rows distributed over the experts at random (Poisson)."""
    mean = rows / num_experts
    total, at = 0.0, 0
    if mean > 50:
        while True:
            above = 0.5 * (1 - erf((at * block + 0.5 - mean) / sqrt(2 * mean)))
            if above < 1e-4:
                return num_experts * total
            total, at = total + above, at + 1
    chance = below = exp(-mean)
    count = 0
    while 1 - below > 1e-6:
        total += 1 - below
        for _ in range(block):
            count += 1
            chance *= mean / count
            below += chance
    return num_experts * total


# Fitted constants of the cost model.
_LAUNCH_US = 2.5
"""Time of an empty kernel in a graph."""
_RAMP_US = 2.0
"""Fixed time of a CTA: reading offsets, the first stage, and the last tile's store."""
_TILE_US = 0.4
"""A tile's epilogue, where the next tile's copies do not hide it."""
_LATENCY_US = 1.1
"""Latency of a copy under load."""
_SM_TBPS = 0.2
"""Peak copy rate of an SM."""
_L2_TBPS = 9.0
"""Peak copy rate from L2, all SMs together."""
_EFFICIENCY = 0.92
"""Share of the read bandwidth that is reached."""
_TENSOR = 0.88
"""Share of the tensor peak within a tile."""
_POINTER_SHARE = 0.6
"""Share of both that the pointer kernel reaches."""
_BLEND = 4.0
"""Exponent that blends the limits' times."""


def predict_us(
    problem: GroupedProblem, config: GroupedConfig, budget: Budget, profile: Profile
) -> float:
    """Predicted time with cold caches, us, from the busiest CTA's tiles, memory and L2."""
    share = _POINTER_SHARE if config.kernel == "pointer" else 1.0
    tiles = row_tiles(problem.rows, problem.num_experts, config.block_m)
    tiles *= ceil(problem.n / config.block_n)
    ctas = num_ctas(problem, config, budget)
    resident = ceil(ctas / budget.num_sms)
    steps = ceil(problem.k / config.block_k)
    step_bytes = 2 * config.block_k * (config.block_m + problem.halves * config.block_n)
    step_us = resident * max(
        _tensor_us(problem, config, profile) * _multiplied(problem, config) / (_TENSOR * share),
        step_bytes / (1e6 * _sm_tbps(config, step_bytes * resident) * share),
    )
    busy = ceil(tiles / ctas) * (steps * step_us + _TILE_US)
    bandwidth = 1e6 * profile.bandwidth(budget.num_sms, confined=budget.confined)
    memory = problem.bytes_moved / (_EFFICIENCY * bandwidth)
    l2 = tiles * steps * step_bytes / (1e6 * _L2_TBPS)
    blended = sum(x**_BLEND for x in (busy, memory, l2)) ** (1 / _BLEND)
    return float(_LAUNCH_US + _RAMP_US + blended)


def _tensor_us(problem: GroupedProblem, config: GroupedConfig, profile: Profile) -> float:
    """Time of a step's products on one SM; below 32 columns, reading the operand dominates."""
    rows, columns = config.block_m, config.block_n * problem.halves
    if config.swap:
        rows = max(rows, 32)
    elif config.kernel == "ws":
        rows = max(rows, 64)
    flops = 2 * rows * columns * config.block_k
    return flops / (profile.info.flops_per_clock * profile.info.sm_clock_mhz)


def _multiplied(problem: GroupedProblem, config: GroupedConfig) -> float:
    """Share of the tiles' rows that is multiplied: with `tails` 11/16 of an expert's last tile."""
    if not config.tails:
        return 1.0
    tiles = row_tiles(problem.rows, problem.num_experts, config.block_m)
    return 1 - 5 / 16 * problem.active / tiles


def _sm_tbps(config: GroupedConfig, in_a_stage: int) -> float:
    """Copy rate of an SM, limited by the stages in flight."""
    stages = config.num_stages - (0 if config.eager else 1)
    return min(_SM_TBPS, 1e-6 * stages * in_a_stage / _LATENCY_US)


@dataclass(frozen=True, slots=True, order=True)
class GroupedKey(Key):
    """Key of a tuned cell."""

    num_experts: int
    n: int
    k: int
    swiglu: bool
    dtype: AttentionDtype
    rows: int
    num_sms: int
    confined: Confinement

    BUCKETED = ("rows",)


GROUPED_FAMILY: BucketFamily[GroupedProblem, GroupedConfig] = BucketFamily(
    name="grouped_gemm",
    key=GroupedKey,
    problems=lambda key: tuple(
        GroupedProblem(key.rows, key.num_experts, key.n, key.k, key.swiglu, key.dtype, aligned)
        for aligned in (True, False)
    ),
    default=GroupedConfig(),
    candidates=lambda problem, budget, profile: configs_of(problem, profile.info.sm),
    predict_us=predict_us,
    legal=lambda problem, config, budget, profile: is_legal(problem, config, profile.info.sm),
)
