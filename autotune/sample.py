"""`smkern autotune --op sample`: measure the sampler inside partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from smkern.autotune import sitting
from smkern.autotune.places import Place
from smkern.autotune.rows import best_cell
from smkern.autotune.sitting import Outcome, Request, Sitting
from smkern.autotune.small import SmallTuner
from smkern.bench.attention.cases import BUDGETS, QUICK_BUDGETS
from smkern.bench.operands import MIN_TOTAL_BYTES
from smkern.device import Budget, Profile
from smkern.ops.sample.call import Sample
from smkern.ops.sample.operators import SAMPLE, sample_dispatcher
from smkern.tuning.cells import CellFile
from smkern.tuning.sample import SampleConfig, SampleProblem, candidates, choose, predict_us
from smkern.tuning.sample_table import CODEC, SampleKey

__all__ = ["BUDGETS", "QUICK_BUDGETS", "Request", "describe", "tune", "tuned_cases"]

ROWS = (1, 8, 32, 64, 128, 512)
"""A bucket of its own for each of the usual decode batches."""
QUICK_ROWS = (32, 128)
VOCABS = (128_256, 151_936)
"""Of Llama-3.1, and of Qwen3."""
TOP_K, TOP_P, TEMPERATURE = 50, 0.95, 0.8
TOLERANCE = 0.5
"""Of tokens against the reference's: one row in thousands may draw another by rounding. Candidates
must draw the same all the same."""


@dataclass(frozen=True, slots=True)
class SampleCase:
    """`rows` rows of a vocabulary in bf16, by top-k, top-p and temperature."""

    rows: int
    vocab: int

    @property
    def name(self) -> str:
        return f"sample-{self.rows}x{self.vocab}"

    @property
    def problem(self) -> SampleProblem:
        return SampleProblem(self.rows, self.vocab)

    @property
    def num_sets(self) -> int:
        """Calls to rotate over, so that a launch finds little of its own in L2; at most 64."""
        return min(64, max(2, -(-MIN_TOTAL_BYTES // self.problem.bytes_moved)))


class Job(NamedTuple):
    """One cell to measure."""

    case: SampleCase
    place: Place


def tuned_cases(*, rows: Sequence[int] = ROWS) -> list[SampleCase]:
    """Every vocabulary for every batch."""
    return [SampleCase(n, vocab) for vocab in VOCABS for n in rows]


def listed(problem: SampleProblem, budget: Budget, profile: Profile) -> tuple[SampleConfig, ...]:
    """The candidates of a cell, the model's choice first, then by its prediction.

    Where launches may overlap, the two first are also measured apart.
    """

    def order(config: SampleConfig) -> tuple[bool, float]:
        first = config == choose(problem, budget, profile)
        return not first, predict_us(problem, config, budget, profile)

    found = sorted(candidates(problem, budget), key=order)
    apart = [replace(x, pdl=False) for x in found[:2]] if budget.confined == "mask" else []
    return (*found, *apart)


def describe(request: Request[SampleCase], profile: Profile) -> None:
    """Print what would be measured on the profile's GPU; needs none."""
    sitting.describe(request, profile, lambda case, budget: listed(case.problem, budget, profile))


def jobs_of(
    request: Request[SampleCase], places: Sequence[Place], done: Callable[[SampleKey], bool]
) -> Iterator[Job]:
    """Cells that are not done, a case after the other, so that its operands are made once."""
    for case in request.cases:
        for place in places:
            if not done(SampleKey.of(case.problem, place.budget)):
                yield Job(case, place)


def calls_of(case: SampleCase, device: str = "cuda") -> list[Sample]:
    """Calls with results, each on logits of its own; every eighth row of several is greedy."""
    generator = torch.Generator(device).manual_seed(case.rows)
    rows = torch.arange(case.rows, device=device)
    temperature = torch.full((case.rows,), TEMPERATURE, device=device)
    temperature[7::8] = 0.0
    top_k = torch.full((case.rows,), TOP_K, dtype=torch.int32, device=device)
    top_p = torch.full((case.rows,), TOP_P, device=device)

    def call() -> Sample:
        shape = case.rows, case.vocab
        logits = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * 4
        finished = torch.zeros(case.rows, dtype=torch.uint8, device=device)
        lengths, out = torch.zeros(2, case.rows, dtype=torch.int32, device=device)
        return Sample(
            logits, temperature, top_k, top_p, seeds=rows, finished=finished, lengths=lengths,
            out=out,
        )  # fmt: skip

    return [call() for _ in range(case.num_sets)]


def tuner_of(case: SampleCase, dispatcher: Any, device: str = "cuda") -> SmallTuner[Any, Any]:
    """What measures a case's cells."""

    def predict(problem: SampleProblem, config: SampleConfig, budget: Budget) -> float:
        return predict_us(problem, config, budget, dispatcher.profile)

    return SmallTuner(SAMPLE, dispatcher, calls_of(case, device), predict, tolerance=TOLERANCE)


def tune(request: Request[SampleCase], out: Path, raw_path: Path, *, fresh: bool) -> None:
    """Measure the cells that the table at `out` lacks (with `fresh` all), and write them there."""
    started = Sitting(request, CellFile(out, CODEC), raw_path, fresh)
    dispatcher = sample_dispatcher(0)
    profile = dispatcher.profile

    def measure(tuner: SmallTuner[Any, Any], job: Job) -> Outcome[SampleKey, SampleConfig]:
        wanted = listed(job.case.problem, job.place.budget, profile)
        found = tuner.measure(job.place, wanted, contended=request.contended)
        return Outcome(found, SampleKey.of(job.case.problem, job.place.budget), best_cell(found))

    started.run(
        profile,
        lambda places, done: jobs_of(request, places, done),
        lambda case: tuner_of(case, dispatcher),
        measure,
    )
