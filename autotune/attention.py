"""`smkern autotune --op attention`: measure attention's candidates inside partitions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smkern.autotune import raw
from smkern.autotune.attention_cases import problem_of
from smkern.bench.attention.cases import BUDGETS, QUICK_BUDGETS, AttentionCase
from smkern.device import Budget, Confinement, Profile
from smkern.tuning.attention import space
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem
from smkern.tuning.attention.table import CODEC, AttentionKey
from smkern.tuning.cells import CellFile, Tuned

if TYPE_CHECKING:
    from smkern.autotune.places import Place

__all__ = ["BUDGETS", "QUICK_BUDGETS", "Request", "describe", "jobs_of", "listed", "tune"]

MAX_CANDIDATES = 12
_SAVE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """What the command was asked for."""

    cases: Sequence[AttentionCase]
    budgets: Sequence[int]
    confined: Sequence[Confinement]
    contended: bool
    time_limit_s: float
    command: str


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
    request: Request,
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


def describe(request: Request, profile: Profile) -> None:
    """Print what would be measured on the profile's GPU; needs none."""
    cells = candidates = 0
    for case in request.cases:
        for num_sms in request.budgets:
            for confined in request.confined:
                found = listed(problem_of(case), Budget(num_sms, confined), profile)
                cells += bool(found)
                candidates += len(found)
    click.echo(f"{cells} cells, {candidates} candidates, for {profile.info.name}")


def tune(request: Request, out: Path, raw_path: Path, *, fresh: bool) -> None:
    """Measure the cells that the table at `out` lacks (with `fresh` all), and write them there."""
    from smkern.autotune.places import Places
    from smkern.bench.results import collect_meta
    from smkern.ops.attention.eager import eager_attention

    started = time.monotonic()
    dispatcher = eager_attention(0).dispatcher
    profile = dispatcher.profile
    file = CellFile(out, CODEC)
    known = file.load(profile.info.name).cells
    places = Places(request.budgets, request.confined)
    with places as found:
        if places.missing:
            click.echo(f"no partition of {places.missing} SMs on this device: left out")
        if request.contended:
            found = [place for place in found if place.neighbour_stream is not None]
        jobs = list(jobs_of(request, found, profile, lambda key: not fresh and key in known))
        click.echo(f"{len(jobs)} cells to measure")
        precompile(jobs, profile)
        meta = collect_meta() | {"command": request.command, "contended": request.contended}
        _measure_all(jobs, request, dispatcher, file, raw_path, meta, started)


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


def _measure_all(
    jobs: Sequence[Job],
    request: Request,
    dispatcher: Any,
    file: CellFile[AttentionKey, Tuned[AttentionConfig]],
    raw_path: Path,
    meta: dict[str, Any],
    started: float,
) -> None:
    from rich.progress import Progress

    from smkern.autotune.attention_measure import AttentionTuner, best_cell
    from smkern.bench.attention.operands import AttentionOperands
    from smkern.bench.stage import trim_memory

    pending: dict[AttentionKey, Tuned[AttentionConfig]] = {}
    saved, left = started, len(jobs)

    def save() -> None:
        if pending:
            file.merge(pending, meta)
            pending.clear()

    with Progress() as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for case, group in groupby(jobs, key=lambda job: job.case):
            tuner = AttentionTuner(dispatcher, AttentionOperands(case))
            for job in group:
                if time.monotonic() - started > request.time_limit_s:
                    save()
                    click.echo(f"time limit: {left} cells left; run the same command again")
                    return
                found = tuner.measure(job.place, job.candidates, contended=request.contended)
                raw.append(raw_path, found)
                cell = best_cell(found, job.candidates[0])
                if cell is None:
                    click.echo(f"{case.name} on {job.place.budget}: {found[0].error}", err=True)
                else:
                    pending[found[0].key] = cell
                left -= 1
                progress.advance(task)
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    save()
                    saved = time.monotonic()
            del tuner
            trim_memory(0)
    save()
    click.echo(f"{len(jobs)} cells in {file.path}; every candidate in {raw_path}")
