"""The GEMM's tuning: which cells lack a result, their candidates compiled, measured, written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smkern.autotune import raw
from smkern.autotune.raw import Measurement
from smkern.autotune.shortlist import Candidate, shortlist
from smkern.autotune.sitting import opened
from smkern.device import Budget, Confinement
from smkern.profile import Profile
from smkern.tuning import space
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem, Kernel
from smkern.tuning.cost_model import predict_us
from smkern.tuning.table import CellKey, Table, TableStore, load_constants, load_tables

if TYPE_CHECKING:
    from smkern.autotune.places import Place

_SAVE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """What the command was asked for."""

    problems: Sequence[GemmProblem]
    top: int
    kernels: tuple[Kernel, ...]
    cublaslt: bool
    contended: bool
    time_limit_s: float
    workers: int


@dataclass(slots=True)
class Job:
    """One cell to measure: its candidates, those measured before left out."""

    problem: GemmProblem
    place: Place
    candidates: list[Candidate]
    known: list[Measurement]


def describe(request: Request, counts: tuple[int, ...], profile: Profile) -> None:
    """Print the cells and the variants that would be compiled, for the profile's GPU."""
    constants = load_constants(profile.info.name)
    variants: set[GemmConfig] = set()
    for num_sms in counts:
        budget = Budget(num_sms, "mask", num_sms > profile.info.num_sms // 2)
        for problem in request.problems:
            for item in _shortlist(request, problem, budget, profile, constants):
                stream = item.config.split != 1
                variants.add(replace(item.config, split=stream, group_m=1, max_ctas=0))
    cells = len(request.problems) * len(counts)
    click.echo(f"{cells} cells, at most {request.top} candidates each, for {profile.info.name}")
    click.echo(f"{len(variants)} kernel variants to compile")


def _shortlist(
    request: Request,
    problem: GemmProblem,
    budget: Budget,
    profile: Profile,
    constants: Any,
    table: Table | None = None,
) -> list[Candidate]:
    """The model's best, and for an epilogue what `table` runs today: mostly the plain GEMM's."""
    found = shortlist(
        problem,
        budget,
        profile,
        constants,
        top=request.top,
        kernels=request.kernels,
        cublaslt=request.cublaslt,
    )
    if table is None or problem.epilogue == Epilogue():
        return found
    today = table.lookup(problem, budget, False)
    if today is None or today.kernel not in request.kernels:
        return found
    if today in {candidate.config for candidate in found}:
        return found
    return [*found, Candidate(today, predict_us(problem, today, budget, profile, constants))]


def tune(
    request: Request,
    counts: tuple[int, ...],
    modes: tuple[Confinement, ...],
    store: TableStore,
    raw_path: Path,
    known: list[Measurement],
    command: str,
) -> None:
    """Measure the cells that `known` lacks and write them to `store`, their record to `raw_path`.

    `command` is what was asked, for the table's provenance.
    """
    from smkern.bench.providers import dispatcher_of
    from smkern.bench.results import collect_meta

    started = time.monotonic()
    dispatcher = dispatcher_of()
    profile = dispatcher.profile
    store.load(profile.info.name)  # a corrupt or foreign table is better found now
    with opened(counts, modes, contended=request.contended) as places:
        jobs = list(_jobs(request, places, profile, known))
        click.echo(f"{len(jobs)} cells to measure")
        _precompile(jobs, dispatcher, request.workers)
        meta = collect_meta() | {"command": command, "contended": request.contended}
        _measure_all(jobs, request, dispatcher, store, raw_path, meta, started)


def _jobs(
    request: Request, places: Sequence[Place], profile: Profile, known: list[Measurement]
) -> Iterator[Job]:
    """Cells with something left to measure, a weight shape after the other."""
    constants, table = load_constants(profile.info.name), load_tables(profile.info.name)
    before: dict[CellKey, list[Measurement]] = {}
    for item in known:
        if item.contended == request.contended:
            before.setdefault(item.key, []).append(item)
    for problem in request.problems:
        for place in places:
            listed = _shortlist(request, problem, place.budget, profile, constants, table)
            past = before.get(CellKey.of(problem, place.budget), [])
            new = [c for c in listed if c.config not in {item.config for item in past}]
            if new:
                yield Job(problem, place, new, past)


def _precompile(jobs: Sequence[Job], dispatcher: Any, workers: int) -> None:
    """Compile all candidates in parallel; one that fails is reported again when it is measured."""
    from smkern.kernels.compile import precompile
    from smkern.kernels.variants import variant_of

    major, minor = dispatcher.profile.info.capability
    variants = {
        variant_of(job.problem, item.config, 10 * major + minor)
        for job in jobs
        for item in job.candidates
        if item.config.kernel not in space.LIBRARIES
    }
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(variants))
        try:
            precompile(
                variants, workers=workers, done=lambda n, _: progress.update(task, completed=n)
            )
        except Exception as error:  # noqa: BLE001
            click.echo(f"a variant does not compile: {str(error).splitlines()[0][:200]}", err=True)


def _measure_all(
    jobs: Sequence[Job],
    request: Request,
    dispatcher: Any,
    store: TableStore,
    raw_path: Path,
    meta: dict[str, Any],
    started: float,
) -> None:
    import torch

    from smkern.autotune.measure import CellTuner, best_cell
    from smkern.bench.operands import Operands

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}
    pending: dict[CellKey, Any] = {}
    saved = time.monotonic()
    left = len(jobs)

    def save() -> None:
        if pending:
            store.merge(pending, meta)
            pending.clear()

    with _progress() as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for (n, k, kind), group in groupby(
            jobs, lambda job: (job.problem.n, job.problem.k, job.problem.dtype)
        ):
            of_shape = list(group)
            operands = Operands(n, k, max(job.problem.m for job in of_shape), dtype[kind])
            tuner = CellTuner(dispatcher, operands)
            for job in of_shape:
                if time.monotonic() - started > request.time_limit_s:
                    save()
                    click.echo(f"time limit: {left} cells left; run the same command again")
                    return
                new = tuner.measure(
                    job.problem, job.place, _with_anchor(job), contended=request.contended
                )
                raw.append(raw_path, new)
                cell = best_cell([*_older(job.known, new), *new])
                if cell is not None:
                    pending[CellKey.of(job.problem, job.place.budget)] = cell
                left -= 1
                progress.advance(task)
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    save()
                    saved = time.monotonic()
            del tuner, operands
            torch.cuda.empty_cache()
    save()
    click.echo(f"{len(jobs)} cells in {store.path}; every candidate in {raw_path}")


def _with_anchor(job: Job) -> list[Candidate]:
    """The new candidates and the fastest known one, timed again in the same rounds."""
    fine = [item for item in job.known if item.error is None]
    if not fine:
        return job.candidates
    best = min(fine, key=lambda item: item.us)
    return [*job.candidates, Candidate(best.config, best.predicted_us)]


def _older(known: list[Measurement], new: list[Measurement]) -> list[Measurement]:
    measured = {item.config for item in new}
    return [item for item in known if item.config not in measured]


def _progress() -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
