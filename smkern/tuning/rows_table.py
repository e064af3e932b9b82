"""Tuned cells of the operators over rows, and the choice of a configuration: table, else model.

A cell is keyed by what a model fixes, the budget, and a bucket (power of two) of the rows. It holds
nothing that a row's bits depend on, so a neighbouring bucket's cell serves as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smkern.device import Confinement, check_budget
from smkern.tuning.cells import Rows, load_cells
from smkern.tuning.near import NearTable, bucket
from smkern.tuning.rows import (
    Budget,
    RowsConfig,
    RowsDtype,
    RowsOp,
    RowsProblem,
    choose,
    is_legal,
)

if TYPE_CHECKING:
    from smkern.profile import Profile

FILE = "rows"
"""Name of the table's file, without its ending."""


@dataclass(frozen=True, slots=True, order=True)
class RowsKey:
    """What a tuned cell is looked up by. `rows` is a bucket."""

    op: RowsOp
    width: int
    dtype: RowsDtype
    rows: int
    num_sms: int
    confined: Confinement

    @classmethod
    def of(cls, problem: RowsProblem, budget: Budget) -> RowsKey:
        return cls(
            problem.op, problem.width, problem.dtype, bucket(problem.rows), budget.num_sms,
            budget.confined,
        )  # fmt: skip

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the bucket."""
        return self.op, self.width, self.dtype, self.num_sms, self.confined

    @property
    def buckets(self) -> tuple[int]:
        return (self.rows,)


CODEC: Rows[RowsKey, RowsConfig] = Rows(RowsKey, RowsConfig())


class RowsTable(NearTable[RowsKey, RowsConfig]):
    """Tuned cells in memory, looked up by problem and budget."""

    __slots__ = ()

    def lookup(self, problem: RowsProblem, budget: Budget) -> RowsConfig | None:
        """The configuration of the nearest cell in exactly `budget`, or None."""
        return self.nearest(
            RowsKey.of(problem, budget), lambda config: is_legal(problem, config, budget)
        )


def select_rows(
    problem: RowsProblem, budget: Budget, profile: Profile, table: RowsTable | None = None
) -> RowsConfig:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    found = None if table is None else table.lookup(problem, budget)
    return found or choose(problem, budget, profile)


def load_rows_table(gpu: str) -> RowsTable:
    """The shipped table of the GPU of that name, with the user's own cells over it; may be empty.

    Raises:
        TableError: one of the files is corrupt, foreign or of another version.
    """
    return RowsTable.of(load_cells(gpu, FILE, CODEC))
