"""The append's tuned cells, and the choice of a configuration: table, else model.

A cell is keyed by what a model fixes, the budget, and a bucket (power of two) of the tokens. It
holds nothing that a row's bits depend on, so a neighbouring bucket's cell serves as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from smkern.device import Confinement, check_budget
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
from smkern.tuning.cells import Rows, load_cells
from smkern.tuning.near import NearTable, bucket

if TYPE_CHECKING:
    from smkern.profile import Profile

FILE = "append"
"""Name of the table's file, without its ending."""


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
            bucket(problem.tokens), budget.num_sms, budget.confined,
        )  # fmt: skip

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the bucket."""
        return (
            self.op, self.num_q_heads, self.num_kv_heads, self.head_dim, self.rotary_dim, self.norm,
            self.dtype, self.cache_dtype, self.num_sms, self.confined,
        )  # fmt: skip

    @property
    def buckets(self) -> tuple[int]:
        return (self.tokens,)


CODEC: Rows[AppendKey, AppendConfig] = Rows(AppendKey, AppendConfig())


class AppendTable(NearTable[AppendKey, AppendConfig]):
    """Tuned cells in memory, looked up by problem and budget."""

    __slots__ = ()

    def lookup(self, problem: AppendProblem, budget: Budget) -> AppendConfig | None:
        """The configuration of the nearest cell in exactly `budget`, or None."""
        return self.nearest(
            AppendKey.of(problem, budget), lambda config: is_legal(problem, config, budget)
        )


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
    check_budget(budget)
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
