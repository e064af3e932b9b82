"""Attention's tuned cells: which run-time numbers are fastest for a kind of step in a budget.

A cell is keyed by what a model fixes, the budget, and buckets (powers of two) of what a step
brings: requests, query tokens of the longest, keys of the mean. It holds nothing that a row's bits
depend on, so a neighbouring bucket's cell serves as well (rule 12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.device import Confinement
from smkern.tuning.attention import space
from smkern.tuning.attention.shapes import (
    DECODE_MAX_Q,
    AttentionConfig,
    AttentionDtype,
    AttentionProblem,
    Budget,
    CacheDtype,
)
from smkern.tuning.attention.space import AttentionPath
from smkern.tuning.cells import Rows, load_cells
from smkern.tuning.near import NearTable, bucket
from smkern.tuning.rules import Capability

OP = "paged_attention"
FILE = "attention"
"""Name of the table's file, without its ending."""


@dataclass(frozen=True, slots=True, order=True)
class AttentionKey:
    """What a tuned cell is looked up by. `batch`, `q_len` and `kv_len` are buckets."""

    op: str
    path: AttentionPath
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: AttentionDtype
    cache_dtype: CacheDtype
    batch: int
    q_len: int
    kv_len: int
    num_sms: int
    confined: Confinement

    @classmethod
    def of(cls, problem: AttentionProblem, budget: Budget) -> AttentionKey:
        shape = problem.shape
        return cls(
            OP,
            space.path_of(shape),
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            problem.dtype,
            problem.cache_dtype,
            bucket(shape.batch),
            bucket(shape.max_q_len),
            bucket(mean_kv_len(problem)),
            budget.num_sms,
            budget.confined,
        )

    @property
    def fixed(self) -> tuple[Any, ...]:
        """All but the buckets."""
        return (
            self.path, self.num_q_heads, self.num_kv_heads, self.head_dim, self.page_size,
            self.dtype, self.cache_dtype, self.num_sms, self.confined,
        )  # fmt: skip

    @property
    def buckets(self) -> tuple[int, int, int]:
        return (self.batch, self.q_len, self.kv_len)


CODEC: Rows[AttentionKey, AttentionConfig] = Rows(AttentionKey, AttentionConfig())


def mean_kv_len(problem: AttentionProblem) -> int:
    """Keys of a request on average, at most, and within the window."""
    shape = problem.shape
    mean = min(shape.max_kv_len, -(-shape.max_total_kv // max(shape.batch, 1)))
    seen = shape.window + min(shape.max_q_len, DECODE_MAX_Q) if shape.window else mean
    return max(1, min(mean, seen))


class AttentionTable(NearTable[AttentionKey, AttentionConfig]):
    """Tuned cells in memory, looked up by problem and budget."""

    __slots__ = ()

    def configs(
        self, problem: AttentionProblem, budget: Budget, capability: Capability
    ) -> list[AttentionConfig]:
        """What `lookup` can find in `budget` for this model, of whatever batch and lengths."""
        kernel = space.served_by(problem, budget, capability)
        return sorted(
            config
            for config in set(self.series(AttentionKey.of(problem, budget)))
            if config.kernel == kernel and space.is_legal(problem, config, budget, capability)
        )

    def lookup(
        self, problem: AttentionProblem, budget: Budget, capability: Capability
    ) -> AttentionConfig | None:
        """The configuration of the nearest cell in exactly `budget`, or None.

        The kernel must be the one that the problem takes anyway, or a table would turn bits.
        """
        kernel = space.served_by(problem, budget, capability)

        def fits(config: AttentionConfig) -> bool:
            return config.kernel == kernel and space.is_legal(problem, config, budget, capability)

        return self.nearest(AttentionKey.of(problem, budget), fits)


def load_attention_table(gpu: str) -> AttentionTable:
    """The shipped table of the GPU of that name, with the user's own cells over it; may be empty.

    Raises:
        TableError: one of the files is corrupt, foreign or of another version.
    """
    return AttentionTable.of(load_cells(gpu, FILE, CODEC))
