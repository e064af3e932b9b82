"""How long an attention step takes in a budget of SMs: bytes, products and load balance.

Decode units (an item and a KV head) are distributed in contiguous shares of equal cost (CUDA) or
number (Triton), so the busiest SM's share counts; prefill units are taken longest first. A unit
costs its keys plus a fixed part; memory bandwidth and the power limit of the budget's SMs are lower
bounds for any distribution.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from smkern.tuning.attention import constraints
from smkern.tuning.attention.shapes import (
    PIECE_COST,
    PREFILL_ROWS,
    PREFILL_TILE,
    AttentionConfig,
    AttentionKernel,
    AttentionProblem,
    Budget,
)
from smkern.tuning.attention.work import Ints, StepWork, count_work, typical_lengths

if TYPE_CHECKING:
    from smkern.device import DeviceInfo
    from smkern.profile import Profile

_EXPONENTIALS_A_CLOCK = 16
"""Exponentials per clock of an SM's special function units."""
_MAX_DEALT = 1 << 14
"""Prefill units beyond which their distribution is treated as even."""


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """Fitted constants of one kernel."""

    launch_us: float = 3.0
    """Fixed time of a kernel in a graph: launch, plan header, first items."""
    latency_us: float = 1.0
    """Latency of loading keys under memory load."""
    sm_tbps: float = 0.13
    """Rate at which an SM stages and multiplies keys, TB/s of a 16-bit cache."""
    fp8_share: float = 0.65
    """Share of `sm_tbps`, in bytes, that remains where e4m3 must be converted."""
    unit_us: float = 1.0
    """Fixed cost of a decode unit: load queries, stage sums, write and announce the partial."""
    merge_us: float = 3.0
    """Time of the last merge, which nothing hides."""
    dram_efficiency: float = 0.92
    """Share of the partition's read bandwidth that is reached."""
    mma_efficiency: float = 0.7
    """Share of the tensor peak inside a long prefill item."""
    exponential_share: float = 0.6
    """Share of a tile's exponentials that no product hides."""
    item_us: float = 2.0
    """Fixed cost of a prefill unit: load queries, latency of the first keys, epilogue."""
    power_efficiency: float = 0.75
    """Share of the profile's power-limited rate."""
    blend: float = 6.0
    """Exponent that blends the ceilings' times; if large, only the longest counts."""


CUDA = KernelConstants(
    launch_us=3.5, sm_tbps=0.118, fp8_share=0.6, unit_us=0.85, merge_us=2.5, dram_efficiency=0.88,
    mma_efficiency=0.84, exponential_share=0.4, item_us=3.3, power_efficiency=0.82,
)  # fmt: skip
"""Fitted to 216 cells of an H200: mean error 7%, choices 0.3% slower than the best."""
TRITON = KernelConstants(sm_tbps=0.08, unit_us=1.5, mma_efficiency=0.5, exponential_share=1.0)
DEFAULTS: Mapping[AttentionKernel, KernelConstants] = {"cuda": CUDA, "triton": TRITON}

Bound = Literal["memory", "work", "power"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step's predicted time, and how it is made up.

    Args:
        predicted_us: time of one launch with cold caches, without the plan, us.
        bound: the limiting one of memory, the busiest SM's work, and power.
        decode_units: decode items times KV heads.
        prefill_units: prefill items times KV heads.
        workers: teams or CTAs that share the decode units.
        ctas: upper bound of the launch's CTAs, which share the prefill units.
        bytes_moved: least traffic from and to memory, bytes.
        flops: FLOPs over visible pairs.
        floor_us: the longer time of bytes and FLOPs at the budget's ceilings, us.
    """

    predicted_us: float
    bound: Bound
    decode_units: int
    prefill_units: int
    workers: int
    ctas: int
    bytes_moved: int
    flops: int
    floor_us: float


def estimate(
    problem: AttentionProblem,
    config: AttentionConfig,
    budget: Budget,
    profile: Profile,
    *,
    kv_lens: Sequence[int] | None = None,
) -> Estimate:
    """The model's estimate for `problem` run by `config` in `budget`.

    Args:
        kv_lens: KV lengths, repeated if too few; None takes the shape's upper bounds.
    """
    shape = problem.shape
    work = count_work(shape, *typical_lengths(shape, kv_lens))
    known = DEFAULTS.get(config.kernel, CUDA)
    ctas = constraints.num_ctas(config, budget)
    teams = config.teams if config.kernel == "cuda" else 1
    decode_us = _decode_us(problem, config, budget, work, known)
    prefill_us = _prefill_us(problem, config, budget, profile, work, known)
    moved, flops = work.bytes_moved(shape, constraints.cache_bytes(problem)), work.flops(shape)
    bandwidth = 1e6 * profile.bandwidth(budget.num_sms, confined=budget.confined)
    rate = 1e6 * profile.flops(budget.num_sms)
    ceilings: dict[Bound, float] = {
        "work": decode_us + prefill_us,
        "memory": moved / (bandwidth * known.dram_efficiency),
        "power": flops / (rate * known.power_efficiency),
    }
    bound = max(ceilings, key=lambda name: ceilings[name])
    fixed = known.launch_us + known.latency_us
    if work.decode_slots or work.prefill_slots:
        fixed += known.merge_us
    return Estimate(
        fixed + _blended(list(ceilings.values()), known.blend),
        bound,
        len(work.decode_keys) * shape.num_kv_heads,
        len(work.prefill_tiles) * shape.num_kv_heads,
        ctas * teams,
        ctas,
        moved,
        flops,
        max(moved / bandwidth, flops / rate),
    )


def predict_us(
    problem: AttentionProblem,
    config: AttentionConfig,
    budget: Budget,
    profile: Profile,
    kv_lens: Sequence[int] | None = None,
) -> float:
    """Predicted time of one launch with cold caches, us."""
    return estimate(problem, config, budget, profile, kv_lens=kv_lens).predicted_us


def _blended(ceilings: Sequence[float], blend: float) -> float:
    """Slightly more than the largest time, as the others interfere with it."""
    largest = max(ceilings)
    if largest <= 0:
        return 0.0
    return float(largest * sum((value / largest) ** blend for value in ceilings) ** (1 / blend))


def bytes_in_flight(problem: AttentionProblem, config: AttentionConfig) -> int:
    """Bytes of keys and values that one worker (CUDA team, Triton CTA) has in flight."""
    if config.kernel == "triton":
        return constraints.triton_stage_bytes(problem, config)
    return constraints.cuda_ring_bytes(problem.shape.head_dim, constraints.cache_bytes(problem))


def _decode_us(
    problem: AttentionProblem,
    config: AttentionConfig,
    budget: Budget,
    work: StepWork,
    known: KernelConstants,
) -> float:
    """Time of the busiest SM's share of the decode units, us."""
    shape = problem.shape
    heads, size = shape.num_kv_heads, constraints.cache_bytes(problem)
    if not len(work.decode_keys):
        return 0.0
    row = 2 * shape.head_dim * size
    partial = 2 * 4 * shape.decode_rows * shape.head_dim if work.decode_slots else 0
    moved = np.repeat(work.decode_keys * row + partial, heads)
    costs = np.repeat(np.maximum(-(-work.decode_keys // PREFILL_TILE), 1) + PIECE_COST, heads)
    if config.kernel != "cuda":
        costs = np.ones_like(costs)
    on_sm, alone, most = _shares(moved, costs, config, budget)
    sm_rate = 1e6 * known.sm_tbps * (known.fp8_share if size == 1 else 1.0)
    worker_rate = min(sm_rate, bytes_in_flight(problem, config) / known.latency_us)
    return float(np.maximum(on_sm / sm_rate, alone / worker_rate).max()) + most * known.unit_us


def _shares(
    moved: Ints, costs: Ints, config: AttentionConfig, budget: Budget
) -> tuple[Ints, Ints, int]:
    """Bytes of each SM and of its busiest worker, and the most units of any worker.

    Worker w of n has the units that begin in [cost w / n, cost (w + 1) / n) of the total cost.
    """
    ctas = constraints.num_ctas(config, budget)
    teams = config.teams if config.kernel == "cuda" else 1
    before = np.cumsum(costs) - costs
    shares = int(costs.sum()) * np.arange(ctas * teams + 1) // (ctas * teams)
    ends = np.searchsorted(before, shares, side="left")
    totals = np.concatenate([[0], np.cumsum(moved)])
    of_worker = (totals[ends[1:]] - totals[ends[:-1]]).reshape(ctas, teams)
    # every SM gets one CTA before any gets a second
    by_sm = of_worker.reshape(ctas // budget.num_sms, budget.num_sms, teams)
    return by_sm.sum(axis=(0, 2)), by_sm.max(axis=(0, 2)), int(np.diff(ends).max())


def tile_us(problem: AttentionProblem, known: KernelConstants, info: DeviceInfo) -> float:
    """Time of a 128 x 128 prefill tile of one head: products, and exponentials not hidden, us."""
    pairs = PREFILL_ROWS * PREFILL_TILE
    products = 4 * pairs * problem.shape.head_dim / (info.flops_per_clock * known.mma_efficiency)
    exponentials = known.exponential_share * pairs / _EXPONENTIALS_A_CLOCK
    return (products + exponentials) / info.sm_clock_mhz


def _prefill_us(
    problem: AttentionProblem,
    config: AttentionConfig,
    budget: Budget,
    profile: Profile,
    work: StepWork,
    known: KernelConstants,
) -> float:
    """When the last CTA finishes, if CTAs take units longest first, us."""
    if not len(work.prefill_tiles):
        return 0.0
    ctas = constraints.num_ctas(config, budget)
    resident = ctas // budget.num_sms
    each = tile_us(problem, known, profile.info) * resident
    partial = 2 * 4 * PREFILL_ROWS * problem.shape.head_dim if work.prefill_slots else 0
    fixed = known.item_us + partial / (1e6 * known.sm_tbps)
    costs = np.repeat(work.prefill_tiles, problem.shape.num_kv_heads) * each + fixed
    if len(costs) <= ctas:
        return float(costs[0])
    if len(costs) > _MAX_DEALT:
        return max(float(costs[0]), float(costs.sum() / ctas + costs[-1]))
    busy = [0.0] * ctas
    for cost in costs.tolist():
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)
