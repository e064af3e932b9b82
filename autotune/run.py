"""One run of the command: places, tables, then the cells that are not in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from smkern.autotune import ceilings
from smkern.autotune.check import Check, report
from smkern.autotune.model import ModelCells, families, model_config, of_rank
from smkern.autotune.operators import OPERATORS, Options
from smkern.autotune.pipeline import Job, Pipeline
from smkern.autotune.places import absent_places, absent_sides, ladder_sides, opened
from smkern.autotune.stop import Stop
from smkern.autotune.tables import Tables
from smkern.device import Confinement, device_info
from smkern.measure.partitions import Place
from smkern.profile import Profile, load_profile
from smkern.tuning.cells import user_path


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a run.

    Args:
        budgets: SM counts; None: the usual ones.
        fresh: Measure again what the tables have.
        dry_run: Only say what would be measured.
        out: The table, or the folder of a model's; None: this user's.
        workers: Processes that compile.
        seconds: Time for everything.
        top: Candidates of a cell; None: what its family takes.
    """

    budgets: Sequence[int] | None
    fresh: bool
    dry_run: bool
    out: Path | None
    workers: int
    seconds: float = float("inf")
    top: int | None = None


def tune_operator(
    asked: Settings,
    *,
    op: str,
    confined: str,
    raw_path: Path | None,
    **options: Any,
) -> None:
    """Measure one operator's cells, a case after the other, and write its table."""
    work = OPERATORS[op](Options(**options))
    family = work.family if asked.top is None else replace(work.family, most=asked.top)
    modes: tuple[Confinement, ...] = ("mask", "grid") if confined == "both" else (confined,)  # type: ignore[assignment]
    counts = asked.budgets or work.budgets

    def jobs(places: Sequence[Place]) -> list[Job]:
        return [Job(family, case, place) for case in work.cases for place in places]

    if asked.dry_run:
        profile = load_profile()
        _describe(jobs(absent_places(counts, modes, profile.info)), profile)
        return
    gpu = device_info().name
    path = asked.out or user_path(gpu, family.name)
    tables = Tables(gpu, lambda _: path, raw_path=raw_path or path.with_suffix(".raw.jsonl"))
    with Stop(asked.seconds) as stop:
        tuning = _Run(asked, tables, stop)
        with opened(counts, modes) as places:
            profile = load_profile(0)
            found = [job for job in jobs(places) if job.wanted(profile)]
            tuning.measure(found, f"{path}; every candidate in {tables.raw_path}")


def tune_model(asked: Settings, *, model: str, tp: int, check: bool) -> None:
    """Measure what a model launches, what can win the most first; or check its tables."""
    whole = model_config(model)
    assert asked.top is not None
    config, known = of_rank(whole, tp), families(asked.top)

    def cells(profile: Profile) -> ModelCells:
        return ModelCells(config, whole.vocab_size, profile, known)

    if asked.dry_run:
        profile = load_profile()
        sides = absent_sides(profile.info).only(asked.budgets)
        _describe(cells(profile).jobs(sides), profile)
        return
    gpu, out = device_info().name, asked.out
    path_of = (lambda name: user_path(gpu, name)) if out is None else (lambda x: out / f"{x}.json")
    # what was shipped for this GPU was measured as well, and is left alone
    tables = Tables(gpu, path_of, shipped=out is None)
    with Stop(asked.seconds) as stop:
        ceilings.ensure(stop)
        profile = load_profile(0)
        with ladder_sides() as sides:
            jobs = cells(profile).jobs(sides.only(asked.budgets))
            run = _Run(asked, tables, stop)
            if check:
                run.check(jobs, profile)
            else:
                run.measure(jobs, str(path_of("*")))


def _describe(jobs: Sequence[Job], profile: Profile) -> None:
    """Print what would be measured on the profile's GPU; needs none."""
    counts: dict[str, list[int]] = {}
    for job in jobs:
        counts.setdefault(job.family.name, []).append(len(job.wanted(profile)))
    every = [count for of_table in counts.values() for count in of_table if count]
    click.echo(f"{len(every)} cells, {sum(every)} candidates, for {profile.info.name}")
    if len(counts) > 1:
        for name, of_table in counts.items():
            click.echo(f"{name}: {sum(map(bool, of_table))} cells, {sum(of_table)} candidates")


@dataclass(frozen=True, slots=True)
class _Run:
    """Measures jobs into tables."""

    asked: Settings
    tables: Tables
    stop: Stop

    def measure(self, jobs: Sequence[Job], where: str) -> None:
        """The jobs that the tables lack (`fresh`: all); whatever ends it, the tables have them.

        Raises:
            TableError: a table cannot be read or written.
        """
        from smkern.measure.provenance import collect_meta

        tables, fresh = self.tables, self.asked.fresh
        todo = [x for x in jobs if not tables.has(x) or fresh]
        click.echo(f"{len(todo)} cells to measure, {len(jobs) - len(todo)} are in the table")
        tables.meta = collect_meta()
        pipeline = self._pipeline(Job.wanted, tables.keep)
        try:
            left = pipeline.run(todo)
        finally:
            tables.save()
        if left:
            why = self.stop.why or "memory is short"
            click.echo(f"{why}: {left} cells left; the same command goes on from here")
        click.echo(f"{len(todo) - left} cells in {where}")

    def check(self, jobs: Sequence[Job], profile: Profile) -> None:
        """Print, by table, what it is worth on these jobs."""
        check = Check(self.tables)
        differing = check.jobs(jobs, profile)
        left = self._pipeline(check.wanted, check.keep).run(differing)
        if left:
            click.echo(f"{self.stop.why or 'memory is short'}: {left} cells are not compared")
        report(check.compared)

    def _pipeline(self, wanted: Any, keep: Any) -> Pipeline:
        return Pipeline(self.stop, self.asked.workers, wanted, keep)
