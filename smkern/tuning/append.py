"""What an append launch is decided by: sizes and options, and the numbers that run it.

A row (one head of one token) is worked on by a few neighbouring lanes of one warp, whatever the
configuration: its bits depend on the problem's kind alone, never on the batch or the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from smkern.device import Budget as Budget
from smkern.tuning.attention import AttentionDtype, CacheDtype
from smkern.tuning.cost_model import CeilingSource

AppendOp = Literal["qk_norm_rope_append", "append_kv"]

VECTOR = 8
"""Elements of a 16-byte load."""
SHAPES = ((4, 1), (8, 2), (16, 2))
"""Warps, and rows a thread, of the CTAs that there are: a few rows, many CTAs an SM, one an SM.

All of them are loaded at a kind's first call, so that no other budget or size compiles anything.
"""
NARROW = ((4, 1), (8, 1))
"""The same for rows that are not whole 16 bytes, which take more registers."""
RESIDENT = 32
"""Warps times rows that an SM's registers hold: 64 a thread and row."""


@dataclass(frozen=True, slots=True, order=True)
class AppendProblem:
    """One append launch.

    `num_q_heads` 0: K and V alone. `rotary_dim` 0: nothing turns. `ragged`: tokens are dealt to
    requests by `cu_q_lens`; else one token a request. `flat`: the page table is. `aligned`: rows
    are whole 16 bytes (8 of an fp8 cache).
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
        """q, k and v read and written once; a position's cosines and sines a token."""
        written = 1 if self.cache_dtype == "fp8" else 2
        kv = 2 * self.kv_rows * self.head_dim * (2 + written)
        table = self.tokens * self.rotary_dim * (4 if self.table_dtype == "fp32" else 2)
        return kv + self.q_rows * self.head_dim * 4 + table

    @property
    def flops(self) -> int:
        """None that count: it waits for memory."""
        return 0

    @property
    def half_lanes(self) -> int:
        """Lanes of a warp that share a row: eight elements of each half a lane."""
        half = 1 << (self.head_dim // 2 - 1).bit_length()
        return half // VECTOR


@dataclass(frozen=True, slots=True, order=True)
class AppendConfig:
    """One way to run an append.

    `rows`: rows that a thread has in flight. `ctas_per_sm` counts only where a mask confines.
    """

    num_warps: int = 8
    rows: int = 2
    ctas_per_sm: int = 4


def tile_rows(problem: AppendProblem, config: AppendConfig) -> int:
    """Rows of a tile, which a CTA works on at a time."""
    return config.rows * 32 * config.num_warps // problem.half_lanes


def num_tiles(problem: AppendProblem, config: AppendConfig) -> int:
    """Tiles of K with V, and of q."""
    rows = tile_rows(problem, config)
    return -(-problem.kv_rows // rows) + -(-problem.q_rows // rows)


def num_ctas(problem: AppendProblem, config: AppendConfig, budget: Budget) -> int:
    """CTAs of a launch: no more than its tiles, one an SM where no mask confines."""
    most = budget.num_sms * (config.ctas_per_sm if budget.confined == "mask" else 1)
    return max(1, min(most, num_tiles(problem, config)))


def shapes_of(problem: AppendProblem) -> tuple[tuple[int, int], ...]:
    """Warps and rows a thread of the kernels that a problem can have."""
    return SHAPES if problem.aligned else NARROW


def candidates(problem: AppendProblem, budget: Budget) -> tuple[AppendConfig, ...]:
    """What is tuned over and what the model chooses from."""
    return tuple(
        AppendConfig(warps, rows, ctas)
        for warps, rows in shapes_of(problem)
        for ctas in ((1, 2, 3, 4, 6, 8) if budget.confined == "mask" else (1,))
        if ctas == 1 or warps * rows * ctas <= RESIDENT
    )


def is_legal(problem: AppendProblem, config: AppendConfig, budget: Budget) -> bool:
    """Whether a configuration is one that kernels are made for in this budget."""
    return config in candidates(problem, budget)


@dataclass(frozen=True, slots=True)
class AppendConstants:
    """What the model does not derive."""

    launch_us: float = 2.0
    """An empty kernel in a graph."""
    chain_us: float = 1.5
    """The chain of loads of a tile: length, page, rows, and their stores."""
    step_us: float = 0.03
    """One more step of the search for a token's request."""
    sm_tbps: float = 0.11
    """What an SM moves, reads and writes together."""
    efficiency: float = 0.85
    """Share of the read bandwidth that a mix of reads and writes has."""
    warp_rows: int = 32
    """Rows of 16-byte loads in flight (warps times rows) at which an SM is at half its rate."""


SHIPPED: Mapping[str, AppendConstants] = {"default": AppendConstants()}


def predict_us(
    problem: AppendProblem,
    config: AppendConfig,
    budget: Budget,
    profile: CeilingSource,
    constants: AppendConstants | None = None,
) -> float:
    """Predicted time of one launch with cold caches, us.

    The busiest SM's tiles at the rate that its loads in flight allow, or the memory of all SMs,
    whichever is longer; plus the launch and one tile's chain of loads.
    """
    known = constants or SHIPPED["default"]
    fixed = known.launch_us + known.chain_us
    if problem.ragged:
        fixed += known.step_us * max(problem.batch - 1, 0).bit_length()
    ctas = num_ctas(problem, config, budget)
    tiles = num_tiles(problem, config)
    on_sm = -(-ctas // budget.num_sms)
    share = -(-tiles // ctas) * on_sm / tiles
    in_flight = config.num_warps * config.rows * on_sm
    rate = 1e6 * known.sm_tbps * 2 * in_flight / (in_flight + known.warp_rows)
    busiest = problem.bytes_moved * share / rate
    bandwidth = 1e6 * profile.bandwidth(budget.num_sms, confined=budget.confined)
    return fixed + max(busiest, problem.bytes_moved / (known.efficiency * bandwidth))


def choose(
    problem: AppendProblem,
    budget: Budget,
    profile: CeilingSource,
    constants: AppendConstants | None = None,
) -> AppendConfig:
    """The configuration that the model expects to be fastest; of equals the smallest CTA."""
    return min(
        candidates(problem, budget),
        key=lambda config: (predict_us(problem, config, budget, profile, constants), config),
    )
