"""The append: problem, candidates and cost model.

A row (one head of one token) is handled by a few neighbouring lanes of one warp in every
configuration, so its bits depend on the kind of problem only, never on the batch or the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from smkern.device import Budget as Budget
from smkern.device import Confinement
from smkern.tuning.attention.shapes import AttentionDtype, CacheDtype
from smkern.tuning.bucket_table import Key, power_of_two
from smkern.tuning.cost_model import CeilingSource
from smkern.tuning.family import BucketFamily

AppendOp = Literal["qk_norm_rope_append", "append_kv"]

VECTOR = 8
"""Elements of a 16-byte load."""
WARPS = (4, 8, 16)
"""CTA sizes, in warps: small ones for a partition, large ones for one CTA per SM.

The first call of a kind loads all of them, so that no other budget or size compiles anything.
"""
RESIDENT, RESIDENT_PLAIN = 16, 32
"""Warps that fit an SM's registers, at 128 per thread; K and V alone take 64."""
MAX_KV_COUNT = 32
"""KV heads of a token processed at a time."""
MAX_Q_ROWS: Mapping[int, int] = {4: 4, 8: 4, 16: 2}
"""CTA size in warps to the heads of q, 16 elements each, that a thread holds in registers."""


@dataclass(frozen=True, slots=True, order=True)
class AppendProblem:
    """One append launch.

    `num_q_heads` 0: K and V only. `rotary_dim` 0: no rotation. `ragged`: `cu_q_lens` assigns
    tokens to requests; otherwise one token per request. `flat`: the page table is flat. `aligned`:
    rows are multiples of 16 bytes (8 in an fp8 cache).
    """

    tokens: int
    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: AttentionDtype = "bf16"
    cache_dtype: CacheDtype = "bf16"
    rotary_dim: int = 0
    interleaved: bool = False
    norm: bool = False
    ragged: bool = False
    flat: bool = False
    table_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    weight_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    aligned: bool = True

    @property
    def op(self) -> AppendOp:
        return "qk_norm_rope_append" if self.num_q_heads else "append_kv"

    @property
    def kv_rows(self) -> int:
        """Rows of K, and of V."""
        return self.tokens * self.num_kv_heads

    @property
    def q_rows(self) -> int:
        return self.tokens * self.num_q_heads

    @property
    def bytes_moved(self) -> int:
        """q, k and v read and written once; cosines and sines once per token."""
        written = 1 if self.cache_dtype == "fp8" else 2
        kv = 2 * self.kv_rows * self.head_dim * (2 + written)
        table = self.tokens * self.rotary_dim * (4 if self.table_dtype == "fp32" else 2)
        return kv + self.q_rows * self.head_dim * 4 + table

    @property
    def half_lanes(self) -> int:
        """Lanes of a warp that share a row: each has eight elements of both halves."""
        half = 1 << (self.head_dim // 2 - 1).bit_length()
        return half // VECTOR


@dataclass(frozen=True, slots=True, order=True)
class AppendConfig:
    """One way to run an append.

    `ctas_per_sm` and `overlap` (start while the previous kernel on the stream still runs:
    programmatic dependent launch, sm_90) apply under a mask only.
    """

    num_warps: int = 4
    ctas_per_sm: int = 4
    overlap: bool = True


def kv_count(problem: AppendProblem) -> int:
    """KV heads processed at a time: all of a token's, padded to a power of two."""
    return min(power_of_two(problem.num_kv_heads), MAX_KV_COUNT)


def item_tokens(problem: AppendProblem, config: AppendConfig) -> int:
    """Tokens of an item: as many as give every lane of a CTA a KV head."""
    return max(1, 32 * config.num_warps // (kv_count(problem) * problem.half_lanes))


def q_count(problem: AppendProblem, config: AppendConfig) -> int:
    """Heads of q processed at a time: many, to load angles rarely, with little padding."""
    lanes = item_tokens(problem, config) * problem.half_lanes
    most = max(1, MAX_Q_ROWS[config.num_warps] * 32 * config.num_warps // lanes)
    most = min(most, power_of_two(max(problem.num_q_heads, 1)))
    counts = [1 << i for i in range(most.bit_length()) if 4 << i >= most]
    return min(counts, key=lambda count: (-(-problem.num_q_heads // count) * count, -count))


def num_items(problem: AppendProblem, config: AppendConfig) -> int:
    """Number of work items."""
    return -(-problem.tokens // item_tokens(problem, config))


def num_ctas(problem: AppendProblem, config: AppendConfig, budget: Budget) -> int:
    """CTAs of a launch: at most one per item, and one per SM without a mask."""
    most = budget.most_ctas(config.ctas_per_sm)
    return max(1, min(most, num_items(problem, config)))


def candidates(problem: AppendProblem, budget: Budget) -> tuple[AppendConfig, ...]:
    """The configurations that the tuner measures and the model chooses from."""
    most = RESIDENT if problem.num_q_heads else RESIDENT_PLAIN
    return tuple(
        AppendConfig(warps, ctas)
        for warps in WARPS
        for ctas in ((1, 2, 3, 4, 6, 8) if budget.confined == "mask" else (1,))
        if ctas == 1 or warps * ctas <= most
    )


# Fitted constants of the cost model.
_LAUNCH_US = 2.0
"""Time of an empty kernel in a graph."""
_CHAIN_US = 1.5
"""A tile's chain of dependent loads (length, page, rows) and the stores."""
_STEP_US = 0.03
"""One more step of the search for a token's request."""
_SM_TBPS = 0.2
"""Peak rate of an SM, reads plus writes."""
_EFFICIENCY = 0.85
"""Share of the read bandwidth that mixed reads and writes reach."""
_HALF_WARPS = 8
"""Warps per SM that reach half of that rate."""
_BLEND = 3.0
"""Exponent that blends SM time and memory time: neither hides the other completely."""


def predict_us(
    problem: AppendProblem, config: AppendConfig, budget: Budget, profile: CeilingSource
) -> float:
    """Predicted time of one launch with cold caches, us.

    The busiest SM's items at the rate that its loads in flight allow, blended with the time of
    memory; plus the launch and one item's chain of loads.
    """
    fixed = _LAUNCH_US + _CHAIN_US
    if problem.ragged:
        fixed += _STEP_US * max(problem.batch - 1, 0).bit_length()
    ctas = num_ctas(problem, config, budget)
    items = num_items(problem, config)
    on_sm = -(-ctas // budget.num_sms)
    share = -(-items // ctas) * on_sm / max(items, 1)
    warps = config.num_warps * on_sm
    rate = 1e6 * _SM_TBPS * warps / (warps + _HALF_WARPS)
    busiest = problem.bytes_moved * share / rate
    bandwidth = 1e6 * profile.bandwidth(budget.num_sms, confined=budget.confined)
    memory = problem.bytes_moved / (_EFFICIENCY * bandwidth)
    return float(fixed + (busiest**_BLEND + memory**_BLEND) ** (1 / _BLEND))


@dataclass(frozen=True, slots=True, order=True)
class AppendKey(Key):
    """Key of a tuned cell."""

    op: AppendOp
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm: bool
    dtype: AttentionDtype
    cache_dtype: CacheDtype
    tokens: int
    num_sms: int
    confined: Confinement

    BUCKETED = ("tokens",)


APPEND_FAMILY: BucketFamily[AppendProblem, AppendConfig] = BucketFamily(
    name="append",
    key=AppendKey,
    problems=lambda key: (
        AppendProblem(key.tokens, 1, key.num_q_heads, key.num_kv_heads, key.head_dim, 16),
    ),
    default=AppendConfig(),
    candidates=lambda problem, budget, profile: candidates(problem, budget),
    predict_us=predict_us,
    overlap={},
)
