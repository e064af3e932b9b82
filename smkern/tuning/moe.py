"""Routing, permutation and un-permutation of experts: problems, candidates and cost model.

Configurations choose the number of threads and CTAs and, for the permutation, whether choices are
compared or counted. Every configuration computes a row in the same way, so its bits do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from smkern.device import Budget as Budget
from smkern.device import Confinement
from smkern.tuning.attention.shapes import AttentionDtype
from smkern.tuning.bucket_table import Key, power_of_two
from smkern.tuning.cost_model import CeilingSource
from smkern.tuning.family import BucketFamily

MoeOp = Literal["topk_softmax", "moe_permute", "moe_unpermute"]
LogitsDtype = Literal["bf16", "fp16", "fp32"]

MAX_EXPERTS = 512
MAX_TOP_K = 32
VECTOR = 8
"""16-bit elements of a 16-byte load."""
WARPS = (4, 16)
"""CTA sizes, in warps: small ones for a partition, large ones for one CTA per SM."""
RESIDENT, RESIDENT_WIDE = 32, 16
"""Warps that fit an SM's registers at 64 per thread, and at 128, which permutations take if they
count choices or have large CTAs."""
TABLES: Mapping[int, int] = {4: 32, 16: 16}
"""CTA size in warps to the elements per thread that a permutation compares or copies at a time."""
COUNTED = 1024
"""Choices per block in which experts are counted."""
FEW, MANY = 1024, 8192
"""Up to `FEW` choices are always compared, from `MANY` on counted; in between it is tuned."""


@dataclass(frozen=True, slots=True, order=True)
class TopkProblem:
    """One routing launch."""

    tokens: int
    num_experts: int
    top_k: int
    renormalize: bool = True
    dtype: LogitsDtype = "bf16"

    @property
    def op(self) -> MoeOp:
        return "topk_softmax"

    @property
    def bytes_moved(self) -> int:
        """Logits read once, weights and experts written."""
        size = 4 if self.dtype == "fp32" else 2
        return self.tokens * (self.num_experts * size + self.top_k * 8)


@dataclass(frozen=True, slots=True, order=True)
class PermuteProblem:
    """One permutation. `aligned`: rows of x and of the result are multiples of 16 bytes."""

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    aligned: bool = True

    @property
    def op(self) -> MoeOp:
        return "moe_permute"

    @property
    def choices(self) -> int:
        return self.tokens * self.top_k

    @property
    def bytes_moved(self) -> int:
        """Each token's row read once and written `top_k` times, plus choices and positions."""
        return self.tokens * self.hidden * 2 * (1 + self.top_k) + self.choices * 8


@dataclass(frozen=True, slots=True, order=True)
class UnpermuteProblem:
    """One weighted sum of each token's rows. `aligned`: all rows are multiples of 16 bytes."""

    tokens: int
    top_k: int
    hidden: int
    residual: bool = False
    dtype: AttentionDtype = "bf16"
    aligned: bool = True

    @property
    def op(self) -> MoeOp:
        return "moe_unpermute"

    @property
    def bytes_moved(self) -> int:
        rows = self.top_k + 1 + self.residual
        return self.tokens * (self.hidden * 2 * rows + self.top_k * 8)


MoeProblem = TopkProblem | PermuteProblem | UnpermuteProblem


@dataclass(frozen=True, slots=True, order=True)
class MoeConfig:
    """One way to run routing, permutation or un-permutation.

    `ctas_per_sm` and `pdl` (start while the previous kernel still runs) apply under a mask only.
    `counted`: a separate launch counts a permutation's choices by blocks.
    """

    num_warps: int = 4
    ctas_per_sm: int = 4
    counted: bool = False
    pdl: bool = True


def block_of(hidden: int, most: int = 1024) -> int:
    """Columns of a token copied or summed at a time."""
    return min(power_of_two(hidden), most)


def table_elements(config: MoeConfig) -> int:
    """Elements of a CTA's comparison tables."""
    return TABLES[config.num_warps] * 32 * config.num_warps


def group_tokens(problem: MoeProblem, config: MoeConfig) -> int:
    """Tokens that a CTA processes at a time."""
    if isinstance(problem, TopkProblem):
        return config.num_warps
    if isinstance(problem, UnpermuteProblem):
        return config.num_warps // 4
    slots = 2 * config.num_warps
    if config.counted:
        # the tables, choices by experts and choices by choices, are held in registers
        table = table_elements(config)
        slots = min(32 if config.num_warps == 4 else 64, table // power_of_two(problem.num_experts))
    return max(1, min(16, slots // power_of_two(problem.top_k)))


def num_items(problem: MoeProblem, config: MoeConfig) -> int:
    """Number of work items."""
    groups = -(-problem.tokens // group_tokens(problem, config))
    if isinstance(problem, UnpermuteProblem):
        return groups * -(-problem.hidden // block_of(problem.hidden))
    if isinstance(problem, PermuteProblem) and not config.counted:
        return groups + -(-(problem.num_experts + 1) // VECTOR)
    return groups


def num_ctas(problem: MoeProblem, config: MoeConfig, budget: Budget) -> int:
    """CTAs of a launch: at most one per item, and one per SM without a mask."""
    most = budget.most_ctas(config.ctas_per_sm)
    return max(1, min(most, num_items(problem, config)))


def ways(problem: MoeProblem) -> tuple[bool, ...]:
    """The values of `counted` allowed for a problem."""
    if not isinstance(problem, PermuteProblem) or problem.choices <= FEW:
        return (False,)
    return (True,) if problem.choices >= MANY else (False, True)


def scratch_bytes(problem: MoeProblem) -> int:
    """Bytes for the counts of a permutation's blocks."""
    if not any(ways(problem)) or not isinstance(problem, PermuteProblem):
        return 0
    return 4 * -(-problem.choices // COUNTED) * power_of_two(problem.num_experts)


def candidates(problem: MoeProblem, budget: Budget) -> tuple[MoeConfig, ...]:
    """The configurations that the tuner measures and the model chooses from."""
    return tuple(
        MoeConfig(warps, ctas, counted)
        for warps in WARPS
        for ctas in ((1, 2, 4, 8) if budget.confined == "mask" else (1,))
        for counted in ways(problem)
        if warps * ctas <= most_warps(problem, warps, counted)
    )


def most_warps(problem: MoeProblem, num_warps: int, counted: bool) -> int:
    """Warps resident on an SM for CTAs of `num_warps` warps."""
    wide = isinstance(problem, PermuteProblem) and (counted or num_warps > 4)
    return RESIDENT_WIDE if wide else RESIDENT


# Fitted constants of the cost model.
_LAUNCH_US = 2.0
"""Time of an empty kernel in a graph."""
_CHAIN_US = 1.5
"""An item's chain of dependent loads, and its stores."""
_ROUND_US = 0.12
"""Time of one argmax round over a row's experts."""
_COMPARES_PER_US = 60_000.0
"""Choices that an SM compares per us."""
_SM_TBPS = 0.2
"""Peak rate of an SM, reads plus writes."""
_EFFICIENCY = 0.85
"""Share of the read bandwidth that mixed reads and writes reach."""
_HALF_WARPS = 8
"""Warps per SM that reach half of that rate."""


def predict_us(
    problem: MoeProblem, config: MoeConfig, budget: Budget, profile: CeilingSource
) -> float:
    """Predicted time with cold caches, us, from the busiest SM's items and memory."""
    fixed = _LAUNCH_US + _CHAIN_US
    ctas = num_ctas(problem, config, budget)
    on_sm = -(-ctas // budget.num_sms)
    rounds = -(-num_items(problem, config) // ctas)
    share = rounds * on_sm / max(num_items(problem, config), 1)
    warps = config.num_warps * on_sm
    busy = problem.bytes_moved * share / (1e6 * _SM_TBPS * warps / (warps + _HALF_WARPS))
    if isinstance(problem, TopkProblem):
        busy += rounds * _ROUND_US * (problem.top_k + 2)
    elif isinstance(problem, PermuteProblem):
        if config.counted:
            fixed += _LAUNCH_US + _CHAIN_US
        else:
            busy += problem.choices**2 * share / _COMPARES_PER_US
    bandwidth = 1e6 * profile.bandwidth(budget.num_sms, confined=budget.confined)
    memory = problem.bytes_moved / (_EFFICIENCY * bandwidth)
    return float(fixed + (busy**3 + memory**3) ** (1 / 3))


@dataclass(frozen=True, slots=True, order=True)
class MoeKey(Key):
    """Key of a tuned cell; sizes that an operator lacks are 0."""

    op: MoeOp
    num_experts: int
    top_k: int
    hidden: int
    tokens: int
    num_sms: int
    confined: Confinement

    BUCKETED = ("tokens",)


def _problems(key: MoeKey) -> tuple[MoeProblem, ...]:
    """Problems of the most and the least tokens of a key."""
    ends = key.tokens, key.tokens // 2 + 1
    if key.op == "topk_softmax":
        return tuple(TopkProblem(tokens, key.num_experts, key.top_k) for tokens in ends)
    if key.op == "moe_unpermute":
        return tuple(UnpermuteProblem(tokens, key.top_k, key.hidden) for tokens in ends)
    return tuple(PermuteProblem(tokens, key.top_k, key.num_experts, key.hidden) for tokens in ends)


MOE_FAMILY: BucketFamily[MoeProblem, MoeConfig] = BucketFamily(
    name="moe",
    key=MoeKey,
    problems=_problems,
    default=MoeConfig(),
    candidates=lambda problem, budget, profile: candidates(problem, budget),
    predict_us=predict_us,
)
