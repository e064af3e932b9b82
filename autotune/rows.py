"""`smkern autotune --op rows`: measure norms, SiLU times up and embeddings inside partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smkern.autotune import sitting
from smkern.autotune.places import Place
from smkern.autotune.sitting import Outcome, Request, Sitting
from smkern.autotune.small import SmallMeasurement, SmallTuner
from smkern.bench.attention.cases import BUDGETS, QUICK_BUDGETS
from smkern.bench.operands import MIN_TOTAL_BYTES
from smkern.device import Budget, Profile
from smkern.ops.rows.call import AddRmsNorm, Embedding, RmsNorm, SiluAndMul
from smkern.ops.rows.operators import ADD_RMS_NORM, EMBEDDING, RMS_NORM, SILU_AND_MUL
from smkern.ops.small import Small
from smkern.tuning.cells import CellFile, Tuned
from smkern.tuning.rows import RowsConfig, RowsOp, RowsProblem, candidates, choose, predict_us
from smkern.tuning.rows_table import CODEC, RowsKey

__all__ = ["BUDGETS", "QUICK_BUDGETS", "Request", "describe", "tune", "tuned_cases"]

ROWS = (2, 16, 128, 1024, 8192)
"""Buckets so far apart that each count of rows has one near."""
QUICK_ROWS = (16, 1024)
HIDDEN = (2048, 4096, 5120)
"""Of Qwen3-30B-A3B; Llama-3.1-8B and Qwen3-8B; Qwen3-14B and -32B."""
GATED = (12288, 14336, 17408, 25600)
"""I of Qwen3-8B, Llama-3.1-8B, Qwen3-14B and -32B."""
MAX_CANDIDATES = 16
SAME_WITHIN = 1.015
"""Times so close are one; the model's choice is kept then."""
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


class Job(NamedTuple):
    """One cell to measure."""

    case: RowsCase
    place: Place


def tuned_cases(*, rows: Sequence[int] = ROWS) -> list[RowsCase]:
    """Every operator of every width that models have, for every size."""
    widths: dict[RowsOp, Sequence[int]] = {
        "rms_norm": HIDDEN, "add_rms_norm": HIDDEN, "silu_and_mul": GATED, "embedding": HIDDEN,
    }  # fmt: skip
    return [RowsCase(op, n, width) for op, some in widths.items() for width in some for n in rows]


def listed(problem: RowsProblem, budget: Budget, profile: Profile) -> tuple[RowsConfig, ...]:
    """The candidates of a cell, the model's choice first, then by its prediction.

    Where launches may overlap, the two first are also measured apart.
    """
    first = choose(problem, budget, profile)

    def order(config: RowsConfig) -> tuple[bool, float]:
        return config != first, predict_us(problem, config, budget, profile)

    found = sorted(candidates(problem, budget), key=order)[:MAX_CANDIDATES]
    apart = [replace(x, pdl=False) for x in found[:2]] if budget.confined == "mask" else []
    return (*found, *apart)


def describe(request: Request[RowsCase], profile: Profile) -> None:
    """Print what would be measured on the profile's GPU; needs none."""
    sitting.describe(request, profile, lambda case, budget: listed(case.problem, budget, profile))


def jobs_of(
    request: Request[RowsCase], places: Sequence[Place], done: Callable[[RowsKey], bool]
) -> Iterator[Job]:
    """Cells that are not done, a case after the other, so that its operands are made once."""
    for case in request.cases:
        for place in places:
            if not done(RowsKey.of(case.problem, place.budget)):
                yield Job(case, place)


def calls_of(case: RowsCase, device: str = "cuda") -> tuple[Small[RowsProblem], list[Any]]:
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


def tuner_of(case: RowsCase, dispatcher: Any, device: str = "cuda") -> SmallTuner[Any, Any]:
    """What measures a case's cells."""
    op, calls = calls_of(case, device)

    def predict(problem: RowsProblem, config: RowsConfig, budget: Budget) -> float:
        return predict_us(problem, config, budget, dispatcher.profile)

    return SmallTuner(op, dispatcher, calls, predict)


def best_cell(found: Sequence[SmallMeasurement[Any, Any]]) -> Tuned[RowsConfig] | None:
    """The fastest, or the first (the model's choice) where it is as fast; None where none ran."""
    return sitting.best_cell(found, found[0].config, same_within=SAME_WITHIN)


def tune(request: Request[RowsCase], out: Path, raw_path: Path, *, fresh: bool) -> None:
    """Measure the cells that the table at `out` lacks (with `fresh` all), and write them there."""
    from smkern.ops.rows.operators import rows_dispatcher

    started = Sitting(request, CellFile(out, CODEC), raw_path, fresh)
    dispatcher = rows_dispatcher(0)
    profile = dispatcher.profile

    def measure(tuner: SmallTuner[Any, Any], job: Job) -> Outcome[RowsKey, RowsConfig]:
        wanted = listed(job.case.problem, job.place.budget, profile)
        found = tuner.measure(job.place, wanted, contended=request.contended)
        key = RowsKey.of(job.case.problem, job.place.budget)
        return Outcome(found, key, best_cell(found))

    started.run(
        profile,
        lambda places, done: jobs_of(request, places, done),
        lambda case: tuner_of(case, dispatcher),
        measure,
        prepare=lambda jobs: _compile({job.case.problem for job in jobs}, dispatcher),
    )


def _compile(problems: set[RowsProblem], dispatcher: Any) -> None:
    """Side by side what the cells launch; the rest is loading."""
    import os

    from smkern.kernels.compile import compile_all
    from smkern.ops.small_dispatch import Compile

    kernels = dispatcher.kernels()
    new = dict.fromkeys(x for problem in problems for x in kernels.variants(problem))
    compile_all([Compile(x) for x in new], workers=len(os.sched_getaffinity(0)))
