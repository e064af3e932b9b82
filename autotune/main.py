"""`smkern autotune`: measure configurations inside partitions and write tables."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smkern.autotune import attention, raw
from smkern.autotune.attention_cases import (
    MODELS,
    QUICK_MODELS,
    heads_option,
    quick_cases,
    tuned_cases,
)
from smkern.autotune.raw import Measurement
from smkern.autotune.shortlist import Candidate, parse_epilogue, problems, shortlist
from smkern.autotune.sitting import opened
from smkern.bench.cases import BUDGETS, MS, SHAPES, IntList, ShapeList
from smkern.device import Budget, Confinement, Profile, load_profile
from smkern.tuning import space
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem, Kernel
from smkern.tuning.table import CellKey, TableStore, load_constants, user_path

if TYPE_CHECKING:
    from smkern.autotune.places import Place

QUICK_SHAPES = ((4096, 4096),)
QUICK_MS = (16, 512)
QUICK_BUDGETS = (32, 100)
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


def _epilogues(ctx: Any, param: Any, value: str) -> tuple[Epilogue, ...]:
    try:
        return tuple(parse_epilogue(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _kernels(ctx: Any, param: Any, value: str | None) -> tuple[Kernel, ...]:
    names = tuple(value.split(",")) if value else space.AVAILABLE
    unknown = [name for name in names if name not in space.AVAILABLE]
    if unknown:
        raise click.BadParameter(f"{unknown} are none of {space.AVAILABLE}")
    return names  # type: ignore[return-value]


@click.command("autotune")
@click.option(
    "--op", type=click.Choice(["gemm", "attention", "append"]), default="gemm", show_default=True
)
@heads_option()
@click.option("--cache-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16")
@click.option("--shapes", type=ShapeList(), help="Weights, as NxK,NxK. Default: the bench's.")
@click.option("--ms", type=IntList(), help="Rows of the activations. Default: the bench's.")
@click.option("--budgets", type=IntList(), help="SM counts: 16,32 or 16-132:2.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option(
    "--epilogue",
    "epilogues",
    default="none",
    callback=_epilogues,
    help="Comma-separated: none, bias, bias+silu, residual, …  [default: none]",
)
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="Candidates.")
@click.option("--kernels", callback=_kernels, help="Only these of our kernels, comma-separated.")
@click.option("--cublaslt/--no-cublaslt", default=True, help="cuBLASLt as a candidate.")
@click.option(
    "--confined", type=click.Choice(["mask", "grid", "both"]), default="mask", show_default=True
)
@click.option("--contended", is_flag=True, help="Beside a memory-bound neighbour.")
@click.option("--quick", is_flag=True, help="A few cells only: seconds of GPU time.")
@click.option(
    "--time-limit-s", type=float, default=float("inf"), help="Stop then; run again later."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Table to write.")
@click.option("--raw", "raw_path", type=click.Path(path_type=Path, dir_okay=False), help="JSONL.")
@click.option("--fresh", is_flag=True, help="Measure again what --raw already has.")
@click.option("--dry-run", is_flag=True, help="Say what would be measured; needs no GPU.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count() or 1, help="Compilers.")
def command(
    op: str,
    heads: Any,
    cache_dtype: Any,
    shapes: Any,
    ms: Any,
    budgets: Any,
    dtype: str,
    epilogues: tuple[Epilogue, ...],
    top: int,
    kernels: tuple[Kernel, ...],
    cublaslt: bool,
    confined: str,
    contended: bool,
    quick: bool,
    time_limit_s: float,
    out: Path | None,
    raw_path: Path | None,
    fresh: bool,
    dry_run: bool,
    workers: int,
) -> None:
    """Measure configurations inside partitions and write the tuned table.

    A cell is a problem in a budget: the model's best candidates are timed in that partition, cold
    L2, interleaved. Every result is also kept in --raw; run again, only what is missing there is
    measured. `python -m smkern.autotune.fit` fits the GEMM's cost model to that file.

    --op attention takes decode batches and prompts of usual lengths for the models of --heads,
    --op append steps of a few tokens and of many.
    """
    modes: tuple[Confinement, ...] = ("mask", "grid") if confined == "both" else (confined,)  # type: ignore[assignment]
    if op == "attention":
        cases = quick_cases(cache_dtype) if quick else None
        if heads or cases is None:
            cases = tuned_cases(heads or MODELS, cache_dtype=cache_dtype)
        counts = budgets or (attention.QUICK_BUDGETS if quick else attention.BUDGETS)
        wanted = attention.Request(cases, counts, modes, contended, time_limit_s, _command_line())
        _tune_other(op, attention, wanted, out, raw_path, fresh=fresh, dry_run=dry_run)
        return
    if op == "append":
        from smkern.autotune import append

        models = heads or (QUICK_MODELS if quick else MODELS)
        tokens = append.QUICK_TOKENS if quick else append.TOKENS
        counts = budgets or (attention.QUICK_BUDGETS if quick else attention.BUDGETS)
        steps = append.tuned_cases(models, cache_dtype=cache_dtype, tokens=tokens)
        other = append.Request(steps, counts, modes, contended, time_limit_s, _command_line())
        _tune_other(op, append, other, out, raw_path, fresh=fresh, dry_run=dry_run)
        return
    request = Request(
        problems(
            shapes or (QUICK_SHAPES if quick else SHAPES),
            ms or (QUICK_MS if quick else MS),
            dtype,
            epilogues,
        ),
        top,
        kernels,
        cublaslt,
        contended,
        time_limit_s,
        workers,
    )
    counts = budgets or (QUICK_BUDGETS if quick else BUDGETS)
    if dry_run:
        _describe(request, counts, load_profile())
        return
    from smkern.device import device_info

    gpu = device_info().name
    out = out or user_path(gpu, "gemm-contended" if contended else "gemm")
    raw_path = raw_path or out.with_suffix(".raw.jsonl")
    known = [] if fresh or not raw_path.exists() else raw.load(raw_path)
    _tune(request, counts, modes, TableStore(out), raw_path, known)


def _tune_other(
    op: str,
    tuner: Any,
    request: Any,
    out: Path | None,
    raw_path: Path | None,
    *,
    fresh: bool,
    dry_run: bool,
) -> None:
    """By an operator's own module: `attention` or `append`."""
    if dry_run:
        tuner.describe(request, load_profile())
        return
    from smkern.device import device_info

    name = f"{op}-contended" if request.contended else op
    out = out or user_path(device_info().name, name)
    tuner.tune(request, out, raw_path or out.with_suffix(".raw.jsonl"), fresh=fresh)


def _describe(request: Request, counts: tuple[int, ...], profile: Profile) -> None:
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
    request: Request, problem: GemmProblem, budget: Budget, profile: Profile, constants: Any
) -> list[Candidate]:
    return shortlist(
        problem,
        budget,
        profile,
        constants,
        top=request.top,
        kernels=request.kernels,
        cublaslt=request.cublaslt,
    )


def _tune(
    request: Request,
    counts: tuple[int, ...],
    modes: tuple[Confinement, ...],
    store: TableStore,
    raw_path: Path,
    known: list[Measurement],
) -> None:
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
        meta = collect_meta() | {"command": _command_line(), "contended": request.contended}
        _measure_all(jobs, request, dispatcher, store, raw_path, meta, started)


def _command_line() -> str:
    """The command as a reader would type it, without paths of this machine."""
    words = sys.argv[2:] if sys.argv[1:2] == ["autotune"] else sys.argv[1:]
    return " ".join(["smkern autotune", *(Path(w).name if w.startswith("/") else w for w in words)])


def _jobs(
    request: Request, places: Sequence[Place], profile: Profile, known: list[Measurement]
) -> Iterator[Job]:
    """Cells with something left to measure, a weight shape after the other."""
    constants = load_constants(profile.info.name)
    before: dict[CellKey, list[Measurement]] = {}
    for item in known:
        if item.contended == request.contended:
            before.setdefault(item.key, []).append(item)
    for problem in request.problems:
        for place in places:
            listed = _shortlist(request, problem, place.budget, profile, constants)
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
        if item.config.kernel != "cublaslt"
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


if __name__ == "__main__":
    command()
