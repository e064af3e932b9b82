"""The append's tuned cells, and the choice of a configuration: table, else model.

A cell is keyed by what a model fixes, the budget, and a bucket (power of two) of the tokens. It
holds nothing that a row's bits depend on, so a neighbouring bucket's cell serves as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from typing import TYPE_CHECKING, Any, Literal

from smkern.device import Confinement
from smkern.errors import BudgetError
from smkern.tuning.append import (
    AppendConfig,
    AppendOp,
    AppendProblem,
    Budget,
    choose,
    is_legal,
    predict_us,
)
from smkern.tuning.attention.shapes import AttentionDtype, CacheDtype
from smkern.tuning.cells import Cells, Rows, Tuned, load_cells

if TYPE_CHECKING:
    from smkern.device import Profile

FILE = "append"
"""Name of the table's file, without its ending."""
NEAR = 2
"""Octaves that a cell's tokens may be off and still serve."""


@dataclass(frozen=True, slots=True, order=True)
class AppendKey:
    """What a tuned cell is looked up by. `tokens` is a bucket."""

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

    @classmethod
    def of(cls, problem: AppendProblem, budget: Budget) -> AppendKey:
        return cls(
            problem.op, problem.num_q_heads, problem.num_kv_heads, problem.head_dim,
            problem.rotary_dim, problem.norm, problem.dtype, problem.cache_dtype,
            1 << max(problem.tokens - 1, 0).bit_length(), budget.num_sms, budget.confined,
        )  # fmt: skip

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the bucket."""
        return (
            self.op, self.num_q_heads, self.num_kv_heads, self.head_dim, self.rotary_dim, self.norm,
            self.dtype, self.cache_dtype, self.num_sms, self.confined,
        )  # fmt: skip


CODEC: Rows[AppendKey, AppendConfig] = Rows(AppendKey, AppendConfig())


@dataclass(slots=True)
class AppendTable:
    """Tuned cells in memory, looked up by problem and budget."""

    meta: dict[str, Any] = field(default_factory=dict)
    cells: dict[AppendKey, Tuned[AppendConfig]] = field(default_factory=dict)
    _series: dict[tuple[Any, ...], list[AppendKey]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for key in sorted(self.cells):
            self._series.setdefault(key.fixed, []).append(key)

    @classmethod
    def of(cls, cells: Cells[AppendKey, Tuned[AppendConfig]]) -> AppendTable:
        return cls(cells.meta, cells.cells)

    def lookup(self, problem: AppendProblem, budget: Budget) -> AppendConfig | None:
        """The configuration of the nearest cell in exactly `budget`, or None."""
        wanted = AppendKey.of(problem, budget)
        near = [
            (abs(log2(key.tokens / wanted.tokens)), key)
            for key in self._series.get(wanted.fixed, ())
        ]
        for octaves, key in sorted(near):
            config = self.cells[key].config
            if octaves <= NEAR and is_legal(problem, config, budget):
                return config
        return None


@dataclass(frozen=True, slots=True)
class Selection:
    """A configuration, where it came from, and the time that the model expects, us."""

    config: AppendConfig
    source: Literal["table", "model"]
    predicted_us: float


def select_append(
    problem: AppendProblem, budget: Budget, profile: Profile, table: AppendTable | None = None
) -> Selection:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    Raises:
        BudgetError: a budget below one SM.
    """
    if budget.num_sms < 1:
        raise BudgetError(f"num_sms is {budget.num_sms}; give at least 1")
    found = None if table is None else table.lookup(problem, budget)
    config = found or choose(problem, budget, profile)
    source: Literal["table", "model"] = "model" if found is None else "table"
    return Selection(config, source, predict_us(problem, config, budget, profile))


def load_append_table(gpu: str) -> AppendTable:
    """The shipped table of the GPU of that name, with the user's own cells over it; may be empty.

    Raises:
        TableError: one of the files is corrupt, foreign or of another version.
    """
    return AppendTable.of(load_cells(gpu, FILE, CODEC))
