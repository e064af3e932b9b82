"""`smkern autotune --op attention`: measure attention's candidates inside partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smkern.autotune import sitting
from smkern.autotune.attention_cases import problem_of
from smkern.autotune.sitting import Outcome, Request, Sitting
from smkern.bench.attention.cases import BUDGETS, QUICK_BUDGETS, AttentionCase
from smkern.device import Budget
from smkern.profile import Profile
from smkern.tuning.attention import space
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem
from smkern.tuning.attention.table import CODEC, AttentionKey
from smkern.tuning.cells import CellFile

if TYPE_CHECKING:
    from smkern.autotune.attention_measure import AttentionTuner
    from smkern.autotune.places import Place

__all__ = ["BUDGETS", "QUICK_BUDGETS", "Request", "describe", "jobs_of", "listed", "tune"]

MAX_CANDIDATES = 12


@dataclass(frozen=True, slots=True)
class Job:
    """One cell to measure."""

    case: AttentionCase
    place: Place
    candidates: tuple[AttentionConfig, ...]


def listed(
    problem: AttentionProblem, budget: Budget, profile: Profile
) -> tuple[AttentionConfig, ...]:
    """The candidates of a cell, the default first: of the kernel that serves the problem anyway.

    Another kernel, or other keys and warps, would turn bits and has no place in a table.
    """
    capability = profile.info.capability
    kernel = space.served_by(problem, budget, capability)
    if kernel is None:
        return ()
    default = default_of(problem, budget, profile)
    found = space.candidates(problem, budget, capability, (kernel,))
    found.sort(key=lambda config: (config != default, _distance(config, default)))
    return tuple(found[:MAX_CANDIDATES])


def default_of(problem: AttentionProblem, budget: Budget, profile: Profile) -> AttentionConfig:
    """What runs where nothing was measured."""
    from smkern.tuning.attention.select import select_attention

    return select_attention(problem, budget, profile).config


def _distance(config: AttentionConfig, default: AttentionConfig) -> int:
    """How unlike the default: those near it are tried first."""
    stages = abs(config.num_stages - default.num_stages) // 2
    ctas = abs(config.ctas_per_sm - default.ctas_per_sm)
    return stages + ctas + abs(config.teams - default.teams)


def jobs_of(
    request: Request[AttentionCase],
    places: Sequence[Place],
    profile: Profile,
    done: Callable[[AttentionKey], bool],
) -> Iterator[Job]:
    """Cells that are not done, a case after the other, so that its caches are made once."""
    for case in request.cases:
        problem = problem_of(case)
        for place in places:
            candidates = listed(problem, place.budget, profile)
            if candidates and not done(AttentionKey.of(problem, place.budget)):
                yield Job(case, place, candidates)


def describe(request: Request[AttentionCase], profile: Profile) -> None:
    """Print what would be measured on the profile's GPU; needs none."""
    sitting.describe(
        request, profile, lambda case, budget: listed(problem_of(case), budget, profile)
    )


def tune(request: Request[AttentionCase], out: Path, raw_path: Path, *, fresh: bool) -> None:
    """Measure the cells that the table at `out` lacks (with `fresh` all), and write them there."""
    from smkern.autotune.attention_measure import AttentionTuner, best_cell
    from smkern.bench.attention.operands import AttentionOperands
    from smkern.ops.attention.eager import eager_attention

    started = Sitting(request, CellFile(out, CODEC), raw_path, fresh)
    dispatcher = eager_attention(0).dispatcher
    profile = dispatcher.profile

    def measure(tuner: AttentionTuner, job: Job) -> Outcome[AttentionKey, AttentionConfig]:
        found = tuner.measure(job.place, job.candidates, contended=request.contended)
        return Outcome(found, found[0].key, best_cell(found, job.candidates[0]))

    started.run(
        profile,
        lambda places, done: jobs_of(request, places, profile, done),
        lambda case: AttentionTuner(dispatcher, AttentionOperands(case)),
        measure,
        prepare=lambda jobs: precompile(jobs, profile),
    )


def precompile(jobs: Sequence[Job], profile: Profile) -> None:
    """Compile the CUDA variants of all candidates side by side, into the cache on disk.

    One that fails is reported again when it is measured.
    """
    from smkern.kernels.attention.cuda import compile_cuda_variant, variant_of

    major, minor = profile.info.capability
    variants = {
        variant_of(problem_of(job.case), config)
        for job in jobs
        for config in job.candidates
        if config.kernel == "cuda"
    }
    with ThreadPoolExecutor() as pool:
        made = {
            pool.submit(compile_cuda_variant, variant, 10 * major + minor) for variant in variants
        }
        errors = [error for future in made if (error := future.exception()) is not None]
    if errors:
        text = str(errors[0]).splitlines()[0][:200]
        click.echo(f"{len(errors)} variants do not compile: {text}", err=True)
