"""Tuned cells of the sampler, and the choice of a configuration: table, else model.

A cell is keyed by the vocabulary, the budget, and a bucket (power of two) of the rows. It holds
nothing that a token depends on, so a neighbouring bucket's cell serves as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smkern.device import Confinement, check_budget
from smkern.tuning.cells import Rows, load_cells
from smkern.tuning.near import NearTable, bucket
from smkern.tuning.sample import (
    Budget,
    SampleConfig,
    SampleDtype,
    SampleProblem,
    choose,
    is_legal,
)

if TYPE_CHECKING:
    from smkern.profile import Profile

FILE = "sample"
"""Name of the table's file, without its ending."""
VOCAB_STEP = 1 << 14
"""Vocabularies are told apart by multiples of it: 128,256 and 131,072 share their cells."""


@dataclass(frozen=True, slots=True, order=True)
class SampleKey:
    """What a tuned cell is looked up by. `rows` is a bucket, `vocab` rounded up."""

    vocab: int
    dtype: SampleDtype
    rows: int
    num_sms: int
    confined: Confinement

    @classmethod
    def of(cls, problem: SampleProblem, budget: Budget) -> SampleKey:
        vocab = -(-problem.vocab // VOCAB_STEP) * VOCAB_STEP
        return cls(vocab, problem.dtype, bucket(problem.rows), budget.num_sms, budget.confined)

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the bucket."""
        return self.vocab, self.dtype, self.num_sms, self.confined

    @property
    def buckets(self) -> tuple[int]:
        return (self.rows,)


CODEC: Rows[SampleKey, SampleConfig] = Rows(SampleKey, SampleConfig())


class SampleTable(NearTable[SampleKey, SampleConfig]):
    """Tuned cells in memory, looked up by problem and budget."""

    __slots__ = ()

    def lookup(self, problem: SampleProblem, budget: Budget) -> SampleConfig | None:
        """The configuration of the nearest cell in exactly `budget`, or None."""
        return self.nearest(
            SampleKey.of(problem, budget), lambda config: is_legal(problem, config, budget)
        )


def select_sample(
    problem: SampleProblem, budget: Budget, profile: Profile, table: SampleTable | None = None
) -> SampleConfig:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    found = None if table is None else table.lookup(problem, budget)
    return found or choose(problem, budget, profile)


def load_sample_table(gpu: str) -> SampleTable:
    """The shipped table of the GPU of that name, with the user's own cells over it; may be empty.

    Raises:
        TableError: one of the files is corrupt, foreign or of another version.
    """
    return SampleTable.of(load_cells(gpu, FILE, CODEC))
