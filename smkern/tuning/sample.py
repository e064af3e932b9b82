"""The sampler: problem, candidates and cost model.

A row's token depends on the row only: its pieces are the same for all batches and budgets, one warp
sums a piece in a fixed order, and everything summed across pieces is an integer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from smkern.device import Budget as Budget
from smkern.device import Confinement
from smkern.tuning.bucket_table import Key
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.cost_model import CeilingSource
from smkern.tuning.family import BucketFamily

SampleDtype = Literal["bf16", "fp16", "fp32"]

MAX_VOCAB = 1 << 18
"""The largest vocabulary that the sort keys have bits for."""
MAX_ROWS = COUNTER_BYTES // 4
"""The most rows that a workspace has counters for."""
GROUP_VECTORS = 8
"""16-byte vectors that a lane reads at a time: a group, whose largest logit is kept."""
WARPS = (4, 8, 16, 32)
"""CTA sizes, in warps: one CTA per SM wants as many as the registers hold; on few SMs, small CTAs
keep reading while others finish their rows.

The first call of a kind loads all of them, so that no other budget or size compiles anything.
"""
RESIDENT_WARPS = 32
"""Warps that fit an SM's registers, at 64 per thread."""


@dataclass(frozen=True, slots=True, order=True)
class SampleProblem:
    """One launch over `rows` rows of `vocab` logits.

    `aligned`: rows begin and end at multiples of 16 bytes.
    """

    rows: int
    vocab: int
    dtype: SampleDtype = "bf16"
    aligned: bool = True

    @property
    def item(self) -> int:
        """Size of a logit, bytes."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def piece(self) -> int:
        """Logits in a piece: what a warp reads at a time."""
        return 32 * GROUP_VECTORS * 16 // self.item

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        return -(-self.vocab // self.piece)

    @property
    def groups(self) -> int:
        """Groups of a row: one per lane and piece."""
        return 32 * self.pieces

    @property
    def bytes_moved(self) -> int:
        """The logits, once."""
        return self.rows * self.vocab * self.item


@dataclass(frozen=True, slots=True, order=True)
class SampleConfig:
    """One way to run the sampler. `ctas_per_sm` and `pdl` apply under a mask only.

    `pdl`: the launch may begin before the previous kernel has ended.
    """

    num_warps: int = 16
    ctas_per_sm: int = 2
    pdl: bool = True


@dataclass(frozen=True, slots=True)
class Grid:
    """CTAs of a launch. `per_row` of them share each row; 0: each takes a range of all rows."""

    num_ctas: int
    per_row: int


def grid_of(problem: SampleProblem, config: SampleConfig, budget: Budget) -> Grid:
    """The CTAs of a launch: at most one per SM without a mask."""
    most = budget.most_ctas(config.ctas_per_sm)
    most = min(most, problem.rows * problem.pieces)
    per_row = most // problem.rows
    return Grid(per_row * problem.rows if per_row else most, per_row)


def workspace_bytes(problem: SampleProblem) -> int:
    """Size of a workspace: counters, a key for each group, a sum for each piece."""
    return COUNTER_BYTES + 4 * problem.rows * (problem.groups + problem.pieces)


def candidates(problem: SampleProblem, budget: Budget) -> tuple[SampleConfig, ...]:
    """The configurations that the tuner measures and the model chooses from."""
    if budget.confined != "mask":
        return tuple(SampleConfig(warps, 1) for warps in WARPS)
    return tuple(
        SampleConfig(warps, ctas)
        for warps in WARPS
        for ctas in (1, 2, 4, 8)
        if warps * ctas <= RESIDENT_WARPS
    )


# Fitted constants of the cost model.
_LAUNCH_US = 2.0
"""Time of an empty kernel in a graph."""
_OVERLAP_US = 1.0
"""Time saved by a launch that starts before the previous kernel has ended."""
_FINISH_US = 5.0
"""Time from a row's last piece to its token, with many warps."""
_WARP_US = 24.0
"""Extra time for the same with a single warp."""
_SM_TBPS = 0.2
"""Peak read rate of an SM."""
_HALF_WARPS = 12
"""Warps per SM that reach half of that rate."""
_EFFICIENCY = 0.9
"""Share of the read bandwidth that is reached."""


def predict_us(
    problem: SampleProblem, config: SampleConfig, budget: Budget, profile: CeilingSource
) -> float:
    """Predicted time of one launch with cold caches, us: one read, plus finishing the last rows."""
    grid = grid_of(problem, config, budget)
    on_sm = -(-grid.num_ctas // budget.num_sms)
    warps = on_sm * config.num_warps
    rate = 1e6 * _SM_TBPS * warps / (warps + _HALF_WARPS)
    share = problem.bytes_moved * on_sm / grid.num_ctas
    bandwidth = _EFFICIENCY * 1e6 * profile.bandwidth(budget.num_sms, confined=budget.confined)
    reading = max(share / rate, problem.bytes_moved / bandwidth)
    # a CTA processes its rows in sequence; while it finishes one, other CTAs read
    ends = -(-problem.rows // grid.num_ctas) * (_FINISH_US + _WARP_US / config.num_warps)
    overlaps = config.pdl and budget.confined == "mask"
    start = _LAUNCH_US - (_OVERLAP_US if overlaps else 0.0)
    return float(start + reading + ends)


VOCAB_STEP = 1 << 14
"""Vocabularies are rounded up to multiples of this: 128,256 and 131,072 share their cells."""


@dataclass(frozen=True, slots=True, order=True)
class SampleKey(Key):
    """Key of a tuned cell; `vocab` is rounded up."""

    vocab: int
    dtype: SampleDtype
    rows: int
    num_sms: int
    confined: Confinement

    BUCKETED = ("rows",)

    @classmethod
    def of(cls, problem: SampleProblem, budget: Budget) -> Self:
        vocab = -(-problem.vocab // VOCAB_STEP) * VOCAB_STEP
        return super(SampleKey, cls).of(replace(problem, vocab=vocab), budget)


SAMPLE_FAMILY: BucketFamily[SampleProblem, SampleConfig] = BucketFamily(
    name="sample",
    key=SampleKey,
    problems=lambda key: (SampleProblem(key.rows, key.vocab, key.dtype),),
    default=SampleConfig(),
    candidates=lambda problem, budget, profile: candidates(problem, budget),
    predict_us=predict_us,
)
