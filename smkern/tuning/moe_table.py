"""Routing's and the permutations' tuned cells; the choice of a configuration: table, else model.

A cell is keyed by what a model fixes, the budget, and a bucket (power of two) of the tokens. It
holds nothing that a row's bits depend on, so a neighbouring bucket's cell serves as well.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from smkern.device import Confinement, check_budget
from smkern.tuning.cells import Rows, load_cells
from smkern.tuning.moe import (
    Budget,
    MoeConfig,
    MoeOp,
    MoeProblem,
    TopkProblem,
    UnpermuteProblem,
    choose,
    is_legal,
)
from smkern.tuning.near import NearTable, bucket

if TYPE_CHECKING:
    from smkern.profile import Profile

FILE = "moe"
"""Name of the table's file, without its ending."""


@dataclass(frozen=True, slots=True, order=True)
class MoeKey:
    """What a tuned cell is looked up by. `tokens` is a bucket; a size that an op has not is 0."""

    op: MoeOp
    num_experts: int
    top_k: int
    hidden: int
    tokens: int
    num_sms: int
    confined: Confinement

    @classmethod
    def of(cls, problem: MoeProblem, budget: Budget) -> MoeKey:
        return cls(
            problem.op,
            0 if isinstance(problem, UnpermuteProblem) else problem.num_experts,
            problem.top_k,
            0 if isinstance(problem, TopkProblem) else problem.hidden,
            bucket(problem.tokens),
            budget.num_sms,
            budget.confined,
        )

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the bucket."""
        op, num_experts, top_k, hidden, _, num_sms, confined = astuple(self)
        return op, num_experts, top_k, hidden, num_sms, confined

    @property
    def buckets(self) -> tuple[int]:
        return (self.tokens,)


CODEC: Rows[MoeKey, MoeConfig] = Rows(MoeKey, MoeConfig())


class MoeTable(NearTable[MoeKey, MoeConfig]):
    """Tuned cells in memory, looked up by problem and budget."""

    __slots__ = ()

    def lookup(self, problem: MoeProblem, budget: Budget) -> MoeConfig | None:
        """The configuration of the nearest cell in exactly `budget`, or None."""
        return self.nearest(
            MoeKey.of(problem, budget), lambda config: is_legal(problem, config, budget)
        )


def select_moe(
    problem: MoeProblem, budget: Budget, profile: Profile, table: MoeTable | None = None
) -> MoeConfig:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    found = None if table is None else table.lookup(problem, budget)
    return found or choose(problem, budget, profile)


def load_moe_table(gpu: str) -> MoeTable:
    """The shipped table of the GPU of that name, with the user's own cells over it; may be empty.

    Raises:
        TableError: one of the files is corrupt, foreign or of another version.
    """
    return MoeTable.of(load_cells(gpu, FILE, CODEC))
