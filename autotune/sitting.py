"""A sitting of the tuner for operators whose cells share a case's operands: measured, saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import click

from smkern.autotune import raw
from smkern.device import Budget, Confinement
from smkern.profile import Profile
from smkern.tuning.cells import CellFile, Tuned

if TYPE_CHECKING:
    from smkern.autotune.places import Place

__all__ = ["Outcome", "Request", "Sitting", "best_cell", "describe", "opened"]

_SAVE_EVERY_S = 10.0

Case = TypeVar("Case")
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
K = TypeVar("K")
T = TypeVar("T")


class Job(Protocol):
    """One cell to measure: a case, which has a name, in a place."""

    @property
    def case(self) -> Any: ...
    @property
    def place(self) -> Place: ...


J = TypeVar("J", bound=Job)


class Measured(raw.Line, Protocol[C_co]):
    """One candidate's result in one cell; `us` is NaN where it failed, then `error` says how."""

    @property
    def config(self) -> C_co: ...
    @property
    def us(self) -> float: ...
    @property
    def error(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Request(Generic[Case]):
    """What the command was asked for."""

    cases: Sequence[Case]
    budgets: Sequence[int]
    confined: Sequence[Confinement]
    contended: bool
    time_limit_s: float
    command: str


@dataclass(frozen=True, slots=True)
class Outcome(Generic[K, C]):
    """A measured cell: all candidates' results, its key, and what the table gets, if any ran."""

    found: Sequence[Measured[C]]
    key: K
    cell: Tuned[C] | None


def best_cell(found: Sequence[Measured[C]], default: C, *, same_within: float) -> Tuned[C] | None:
    """The fastest, or the default within `same_within` times its time; None where nothing ran."""
    fine = [item for item in found if item.error is None]
    if not fine:
        return None
    fastest = min(fine, key=lambda item: item.us)
    for item in fine:
        if item.config == default and item.us <= same_within * fastest.us:
            return Tuned(item.config, item.us)
    return Tuned(fastest.config, fastest.us)


def describe(
    request: Request[Case], profile: Profile, listed: Callable[[Case, Budget], Sequence[Any]]
) -> None:
    """Print what would be measured on the profile's GPU, of the candidates listed; needs none."""
    counts = [
        len(listed(case, Budget(num_sms, confined)))
        for case in request.cases
        for num_sms in request.budgets
        for confined in request.confined
    ]
    cells = sum(count > 0 for count in counts)
    click.echo(f"{cells} cells, {sum(counts)} candidates, for {profile.info.name}")


@contextmanager
def opened(
    budgets: Sequence[int], confined: Sequence[Confinement], *, contended: bool
) -> Iterator[list[Place]]:
    """The places of these budgets, `contended` only those with room for a neighbour.

    Says which budgets the device has no partition of.
    """
    from smkern.autotune.places import Places

    places = Places(budgets, confined)
    with places as found:
        if places.missing:
            click.echo(f"no partition of {places.missing} SMs on this device: left out")
        if contended:
            found = [place for place in found if place.neighbour_stream is not None]
        yield found


@dataclass(slots=True)
class Sitting(Generic[K, C]):
    """One run of the command; the table is written every few seconds and at the end.

    Args:
        request: what the command was asked for; its time limit counts from here.
        file: the table.
        raw_path: gets a line for every candidate.
        fresh: measure the cells that the table has, too.
    """

    request: Request[Any]
    file: CellFile[K, Tuned[C]]
    raw_path: Path
    fresh: bool
    _started_s: float = field(init=False)
    _saved_s: float = field(init=False)
    _pending: dict[K, Tuned[C]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._started_s = self._saved_s = time.monotonic()

    def run(
        self,
        profile: Profile,
        jobs_of: Callable[[Sequence[Place], Callable[[K], bool]], Iterable[J]],
        tuner_of: Callable[[Any], T],
        measure: Callable[[T, J], Outcome[K, C]],
        prepare: Callable[[Sequence[J]], None] | None = None,
    ) -> None:
        """Measure the cells that the table lacks (with `fresh` all), and write them there.

        Args:
            profile: of the device.
            jobs_of: the cells of these places that are not done, a case after the other.
            tuner_of: a case's tuner; it is dropped before the next case's is made.
            measure: one cell, by its case's tuner.
            prepare: called once with all jobs, before the first.
        """
        from smkern.bench.results import collect_meta

        request = self.request
        known = self.file.load(profile.info.name).cells
        with opened(request.budgets, request.confined, contended=request.contended) as places:
            jobs = list(jobs_of(places, lambda key: not self.fresh and key in known))
            click.echo(f"{len(jobs)} cells to measure")
            if prepare is not None:
                prepare(jobs)
            meta = collect_meta() | {"command": request.command, "contended": request.contended}
            self._measure_all(jobs, tuner_of, measure, meta)

    def _measure_all(
        self,
        jobs: Sequence[J],
        tuner_of: Callable[[Any], T],
        measure: Callable[[T, J], Outcome[K, C]],
        meta: dict[str, Any],
    ) -> None:
        from rich.progress import Progress

        from smkern.bench.stage import trim_memory

        left = len(jobs)
        with Progress() as progress:
            task = progress.add_task("measuring", total=len(jobs))
            for case, group in groupby(jobs, key=lambda job: job.case):
                tuner = tuner_of(case)
                for job in group:
                    if time.monotonic() - self._started_s > self.request.time_limit_s:
                        self._save(meta)
                        click.echo(f"time limit: {left} cells left; run the same command again")
                        return
                    self._keep(job, measure(tuner, job))
                    left -= 1
                    progress.advance(task)
                    if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
                        self._save(meta)
                        self._saved_s = time.monotonic()
                del tuner
                trim_memory(0)
        self._save(meta)
        click.echo(f"{len(jobs)} cells in {self.file.path}; every candidate in {self.raw_path}")

    def _keep(self, job: Job, outcome: Outcome[K, C]) -> None:
        """The candidates' lines at once; the cell until the table is written next."""
        raw.append(self.raw_path, outcome.found)
        if outcome.cell is None:
            error = outcome.found[0].error
            click.echo(f"{job.case.name} on {job.place.budget}: {error}", err=True)
        else:
            self._pending[outcome.key] = outcome.cell

    def _save(self, meta: dict[str, Any]) -> None:
        if self._pending:
            self.file.merge(self._pending, meta)
            self._pending.clear()
