"""The grouped GEMM's tuned cells, and the choice of a configuration: table, else model.

A cell is keyed by what a model fixes, the budget, and a bucket (power of two) of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smkern.device import Confinement, check_budget
from smkern.tuning.attention.shapes import AttentionDtype
from smkern.tuning.cells import Rows, load_cells
from smkern.tuning.grouped import Budget, GroupedConfig, GroupedProblem, choose, is_legal
from smkern.tuning.near import NearTable, bucket

if TYPE_CHECKING:
    from smkern.profile import Profile

FILE = "grouped_gemm"
"""Name of the table's file, without its ending."""


@dataclass(frozen=True, slots=True, order=True)
class GroupedKey:
    """What a tuned cell is looked up by. `rows` is a bucket."""

    num_experts: int
    n: int
    k: int
    swiglu: bool
    dtype: AttentionDtype
    rows: int
    num_sms: int
    confined: Confinement

    @classmethod
    def of(cls, problem: GroupedProblem, budget: Budget) -> GroupedKey:
        return cls(
            problem.num_experts, problem.n, problem.k, problem.swiglu, problem.dtype,
            bucket(problem.rows), budget.num_sms, budget.confined,
        )  # fmt: skip

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the bucket."""
        return (
            self.num_experts, self.n, self.k, self.swiglu, self.dtype, self.num_sms, self.confined,
        )  # fmt: skip

    @property
    def buckets(self) -> tuple[int]:
        return (self.rows,)


CODEC: Rows[GroupedKey, GroupedConfig] = Rows(GroupedKey, GroupedConfig())


class GroupedTable(NearTable[GroupedKey, GroupedConfig]):
    """Tuned cells in memory, looked up by problem and budget."""

    __slots__ = ()

    def lookup(
        self, problem: GroupedProblem, budget: Budget, capability: int
    ) -> GroupedConfig | None:
        """The configuration of the nearest cell in exactly `budget`, or None."""
        return self.nearest(
            GroupedKey.of(problem, budget),
            lambda config: is_legal(problem, config, budget, capability),
        )


def select_grouped(
    problem: GroupedProblem, budget: Budget, profile: Profile, table: GroupedTable | None = None
) -> GroupedConfig:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    major, minor = profile.info.capability
    capability = 10 * major + minor
    found = None if table is None else table.lookup(problem, budget, capability)
    return found or choose(problem, budget, profile, capability)


def load_grouped_table(gpu: str) -> GroupedTable:
    """The shipped table of the GPU of that name, with the user's own cells over it; may be empty.

    Raises:
        TableError: one of the files is corrupt, foreign or of another version.
    """
    return GroupedTable.of(load_cells(gpu, FILE, CODEC))
