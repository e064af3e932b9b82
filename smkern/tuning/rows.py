"""Norms, SiLU-and-multiply, embedding rows: problem, candidates and cost model.

A row's bits depend on its width and dtype only: configurations change which threads work on it,
not the order of its sums (`smkern/kernels/rows_triton.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from smkern.device import Budget as Budget
from smkern.device import check_budget
from smkern.tuning.constraints import Capability, shared_limit
from smkern.tuning.cost_model import CeilingSource

if TYPE_CHECKING:
    from smkern.profile import Profile

RowsOp = Literal["rms_norm", "add_rms_norm", "silu_and_mul", "embedding"]
RowsDtype = Literal["bf16", "fp16"]

VECTOR = 8
"""Elements of a 16-byte load."""
WHOLE = 32 * VECTOR
"""Elements of a row that a warp processes at a time: a piece."""
MAX_WIDTH = 16384
"""The longest row that a norm holds in registers, elements."""
WARPS = (4, 8, 16, 32)
"""Warps of a norm's CTA, which works on one row at a time."""
SHAPES = ((4, 1), (4, 4), (16, 1), (16, 4))
"""(warps, vectors per thread) for the operators that do not need a whole row."""
MAX_HELD = 64
"""The most elements of a row per thread: with more the compiler spills."""
MAX_PREFETCHED = 40
"""The same limit with the next row prefetched."""
MAX_FAR = 32
"""The same limit with the next three rows prefetched."""
RESIDENT = (1, 2, 3, 4, 6, 8, 12, 16)
REGISTERS_PER_SM = 65536
WARPS_PER_SM, FEWER_WARPS = 64, 48
"""That an SM holds: on sm_80, sm_90 and sm_100, and on others."""
PASSES: Mapping[str, int] = {"rms_norm": 2, "add_rms_norm": 4, "silu_and_mul": 3, "embedding": 2}
"""Reads plus writes per element of the result."""


@dataclass(frozen=True, slots=True, order=True)
class RowsProblem:
    """One launch over `rows` rows of `width` elements of the result.

    `aligned`: rows begin at multiples of 16 bytes. `weight_dtype` is for a norm's weight,
    `index_dtype` for an embedding's ids.
    """

    op: RowsOp
    rows: int
    width: int
    dtype: RowsDtype = "bf16"
    weight_dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    index_dtype: Literal["i32", "i64"] = "i32"
    aligned: bool = True

    @property
    def is_norm(self) -> bool:
        return self.op in ("rms_norm", "add_rms_norm")

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be moved; a norm's weights are negligible."""
        return 2 * PASSES[self.op] * self.rows * self.width


@dataclass(frozen=True, slots=True, order=True)
class RowsConfig:
    """One way to run a row operator. `ctas_per_sm` and `pdl` apply under a mask only.

    `vectors`: 16-byte loads per thread (a norm has as many as its row needs). `stages` 2 or 4: a
    norm prefetches the next row, or the next three. `pdl`: the launch may begin before the previous
    kernel has ended.
    """

    num_warps: int = 4
    vectors: int = 1
    ctas_per_sm: int = 8
    stages: int = 1
    pdl: bool = True


def pieces(width: int, num_warps: int) -> tuple[int, int]:
    """A row's pieces as two powers of two, each at least one per warp; the second may be 0."""
    count = max(1, -(-width // WHOLE))
    first = max(1 << (count.bit_length() - 1), num_warps)
    if first >= count:
        return first, 0
    rest = max(1 << (count - first - 1).bit_length(), num_warps)
    return (2 * first, 0) if rest == first else (first, rest)


def held(problem: RowsProblem, config: RowsConfig) -> int:
    """Elements of an item that a thread works on."""
    if problem.is_norm:
        return sum(pieces(problem.width, config.num_warps)) * VECTOR // config.num_warps
    return config.vectors * VECTOR


def registers(problem: RowsProblem, config: RowsConfig) -> int:
    """Estimated registers per thread; compiled kernels are within an eighth of it."""
    if not problem.is_norm:
        return 32 + max(0, 2 * config.vectors - 2)
    quarters = 7 if config.stages == 1 else 10
    return min(255, 24 + quarters * held(problem, config) // 4)


def shared_bytes(problem: RowsProblem, config: RowsConfig) -> int:
    """Shared memory of a CTA's prefetched rows, bytes."""
    if not problem.is_norm:
        return 0
    rows = PASSES[problem.op] // 2
    return (config.stages - 1) * rows * 2 * WHOLE * sum(pieces(problem.width, config.num_warps))


def block(config: RowsConfig) -> int:
    """Columns of an item, for operators that do not need a whole row."""
    return config.num_warps * config.vectors * WHOLE


def num_items(problem: RowsProblem, config: RowsConfig) -> int:
    """Number of work items: rows, or blocks of their columns."""
    if problem.is_norm:
        return problem.rows
    return problem.rows * -(-problem.width // block(config))


def num_ctas(problem: RowsProblem, config: RowsConfig, budget: Budget) -> int:
    """CTAs of a launch: at most one per item, and one per SM without a mask."""
    most = budget.most_ctas(config.ctas_per_sm)
    return max(1, min(most, num_items(problem, config)))


def shapes_of(problem: RowsProblem) -> tuple[RowsConfig, ...]:
    """All configurations of a kind of problem that differ in compiled code."""
    if not problem.is_norm:
        made = [RowsConfig(warps, vectors, 1) for warps, vectors in SHAPES]
        return tuple(x for x in made if x == made[0] or block(x) < 2 * problem.width)
    count = max(1, problem.width // WHOLE)
    found = []
    for warps in WARPS:
        if warps > max(4, count):
            continue
        for stages, most in ((1, MAX_HELD), (2, MAX_PREFETCHED), (4, MAX_FAR)):
            config = RowsConfig(warps, 1, 1, stages)
            if held(problem, config) <= most and (stages == 1 or warps <= 8):
                found.append(config)
    return tuple(found)


def warps_per_sm(capability: Capability) -> int:
    return WARPS_PER_SM if capability == (8, 0) or capability[0] in (9, 10) else FEWER_WARPS


def candidates(
    problem: RowsProblem, budget: Budget, capability: Capability = (9, 0)
) -> tuple[RowsConfig, ...]:
    """The configurations that the model chooses from, with `pdl`."""
    found = []
    warps, shared = warps_per_sm(capability), shared_limit(capability)
    for config in shapes_of(problem):
        fitting = REGISTERS_PER_SM // (32 * registers(problem, config))
        most = min(warps, fitting) // config.num_warps
        most = min(most, shared // (shared_bytes(problem, config) + 1024))
        for ctas in RESIDENT if budget.confined == "mask" else (1,):
            if ctas == 1 or ctas <= most:
                found.append(replace(config, ctas_per_sm=ctas))
    return tuple(found)


# Fitted constants of the cost model.
_LAUNCH_US = 1.6
"""Time of an empty kernel in a graph."""
_CHAIN_US = 0.9
"""Time of a single item: its loads, its sum, its stores."""
_ELEMENT_US = 0.008
"""Time added by each element per thread."""
_HIDDEN = 0.45
"""Share of an item's time that remains when the next one is prefetched; squared for three."""
_SM_TBPS = 0.2
"""Peak rate of an SM, reads plus writes."""
_EFFICIENCY = 0.9
"""Share of the read bandwidth that mixed reads and writes reach."""
_BLEND = 3.0
"""Exponent that blends the three times: none hides the others completely."""


def predict_us(problem: RowsProblem, config: RowsConfig, budget: Budget, memory_us: float) -> float:
    """Predicted time of one launch with cold caches, us.

    A CTA's items in sequence, the busiest SM's bytes and `memory_us`, blended into slightly more
    than the longest, plus the launch.
    """
    ctas, items = num_ctas(problem, config, budget), num_items(problem, config)
    on_sm = -(-ctas // budget.num_sms)
    rounds = -(-items // ctas)
    chain = _CHAIN_US + _ELEMENT_US * held(problem, config)
    left = _HIDDEN ** (config.stages.bit_length() - 1)
    serial = chain * (1 + (rounds - 1) * left)
    busiest = problem.bytes_moved * rounds * on_sm / max(items, 1) / (1e6 * _SM_TBPS)
    times = (serial, busiest, memory_us)
    return float(_LAUNCH_US + sum(x**_BLEND for x in times) ** (1 / _BLEND))


def memory_us(problem: RowsProblem, budget: Budget, profile: CeilingSource) -> float:
    """Time of a problem's bytes at the budget's bandwidth, us."""
    bandwidth = 1e6 * profile.bandwidth(budget.num_sms, confined=budget.confined)
    return problem.bytes_moved / (_EFFICIENCY * bandwidth)


def choose(problem: RowsProblem, budget: Budget, profile: Profile) -> RowsConfig:
    """The configuration that the model predicts to be fastest; the smallest CTA among equals.

    There is no table: tuned cells were only 1% faster in geomean (162 cells of norms, H200).

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    memory = memory_us(problem, budget, profile)
    return min(
        candidates(problem, budget, profile.info.capability),
        key=lambda config: (predict_us(problem, config, budget, memory), config),
    )
