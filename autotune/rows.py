"""`smkern autotune --op rows`: measure norms, SiLU times up and embeddings inside partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smkern.autotune.family import MeasuredFamily, ranked
from smkern.autotune.small import small_tasks, small_tuner
from smkern.measure.timing import MIN_TOTAL_BYTES
from smkern.ops.operator import Operator
from smkern.ops.rows.call import AddRmsNorm, Embedding, RmsNorm, SiluAndMul
from smkern.ops.rows.dispatch import rows_dispatcher
from smkern.ops.rows.operators import ADD_RMS_NORM, EMBEDDING, RMS_NORM, SILU_AND_MUL
from smkern.tuning import rows as tuning
from smkern.tuning.rows import RowsOp, RowsProblem

ROWS = (2, 16, 128, 1024, 8192)
"""Buckets so far apart that each count of rows has one near."""
QUICK_ROWS = (16, 1024)
HIDDEN = (2048, 4096, 5120)
"""Of Qwen3-30B-A3B; Llama-3.1-8B and Qwen3-8B; Qwen3-14B and -32B."""
GATED = (12288, 14336, 17408, 25600)
"""I of Qwen3-8B, Llama-3.1-8B, Qwen3-14B and -32B."""
TABLE_ROWS = 32768
"""Of an embedding's table: enough that L2 does not hold it."""


@dataclass(frozen=True, slots=True)
class RowsCase:
    """One operator over `rows` rows of `width` elements of the result, in bf16."""

    op: RowsOp
    rows: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.op}-{self.rows}x{self.width}"

    @property
    def problem(self) -> RowsProblem:
        return RowsProblem(self.op, self.rows, self.width)

    @property
    def num_sets(self) -> int:
        """Calls to rotate over, so that a launch finds little of its own in L2; at most 64."""
        return min(64, max(2, -(-MIN_TOTAL_BYTES // self.problem.bytes_moved)))


def tuned_cases(*, rows: Sequence[int] = ROWS) -> list[RowsCase]:
    """Every operator of every width that models have, for every size."""
    widths: dict[RowsOp, Sequence[int]] = {
        "rms_norm": HIDDEN, "add_rms_norm": HIDDEN, "silu_and_mul": GATED, "embedding": HIDDEN,
    }  # fmt: skip
    return [RowsCase(op, n, width) for op, some in widths.items() for width in some for n in rows]


def calls_of(case: RowsCase, device: str = "cuda") -> tuple[Operator[RowsProblem], list[Any]]:
    """The operator, and calls with results, each on rows of its own."""
    generator = torch.Generator(device).manual_seed(case.rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    rows, width = case.rows, case.width
    weight, table = random(width), None
    if case.op == "embedding":
        table = random(TABLE_ROWS, width)

    def call() -> Any:
        out = torch.empty(rows, width, device=device, dtype=torch.bfloat16)
        if case.op == "rms_norm":
            return RmsNorm(random(rows, width), weight, out=out)
        if case.op == "add_rms_norm":
            return AddRmsNorm(random(rows, width), random(rows, width), weight, out=out)
        if case.op == "silu_and_mul":
            return SiluAndMul(random(rows, 2 * width), out)
        ids = torch.randint(TABLE_ROWS, (rows,), generator=generator, device=device)
        return Embedding(ids.int(), table, out)

    ops = {op.name: op for op in (RMS_NORM, ADD_RMS_NORM, SILU_AND_MUL, EMBEDDING)}
    return ops[case.op], [call() for _ in range(case.num_sets)]


FAMILY = MeasuredFamily(
    family=tuning.ROWS,
    listed=ranked(tuning.ROWS),
    dispatcher=rows_dispatcher,
    tuner=small_tuner(calls_of),
    tasks=small_tasks,
    most=16,
)
