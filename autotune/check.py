"""What a table is worth: dispatch's pick with it, timed against the cost model's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

import click

from smkern.autotune.pipeline import Found, Job, Wanted
from smkern.autotune.tables import Tables


@dataclass(frozen=True, slots=True)
class Compared:
    """A cell: the time of the table's pick over that of the model's; 1 where they are the same."""

    table: str
    cell: str
    ratio: float


@dataclass(slots=True)
class Check:
    """Compares the picks of tables with the model's, in the same rounds.

    Args:
        tables: Tables as dispatch reads them.
    """

    tables: Tables
    compared: list[Compared] = field(default_factory=list)
    _tables: dict[str, Any] = field(init=False, default_factory=dict)

    def jobs(self, jobs: Iterable[Job], profile: Any) -> list[Job]:
        """The cells in a table whose picks differ; the others' ratio is 1."""
        found = []
        for job in jobs:
            if not self.tables.has(job):
                continue
            tuned, untuned = self._picks(job, profile)
            if tuned == untuned:
                self._add(job, 1.0)
            else:
                found.append(job)
        return found

    def wanted(self, job: Job, profile: Any) -> Wanted:
        """Both picks, the table's first, and the time that the model expects of its own."""
        listed = job.wanted(profile)
        return dict.fromkeys(self._picks(job, profile), min(listed.values()))

    def keep(self, job: Job, found: Found) -> bool:
        """Note the ratio; False where one of both did not run."""
        if any(item.error is not None for item in found):
            return False
        tuned, untuned = found
        self._add(job, tuned.us / untuned.us)
        return True

    def _picks(self, job: Job, profile: Any) -> tuple[Any, Any]:
        family = job.family.tuned
        if family.name not in self._tables:
            self._tables[family.name] = family.table_of(self.tables.of(job.family))
        of_table, problem, budget = self._tables[family.name], job.problem, job.budget
        tuned = family.config(problem, budget, profile, of_table)
        return tuned, family.config(problem, budget, profile)

    def _add(self, job: Job, ratio: float) -> None:
        cell = f"{job.case.name} on {job.budget.num_sms} SMs"
        self.compared.append(Compared(job.family.name, cell, ratio))


def report(compared: Sequence[Compared]) -> None:
    """Print, by table, tuned over untuned: cells, geomean and worst cell."""
    if not compared:
        click.echo("no cell of this model is in a table: run the command without --check first")
        return
    by_table: Mapping[str, list[Compared]] = {item.table: [] for item in compared}
    for item in compared:
        by_table[item.table].append(item)
    click.echo("tuned over untuned (time; below 1 the table is faster)")
    for table, items in by_table.items():
        worst = max(items, key=lambda item: item.ratio)
        mean = geometric_mean(item.ratio for item in items)
        click.echo(
            f"{table}: {len(items)} cells, geomean {mean:.3f}, worst {worst.ratio:.3f} "
            f"({worst.cell})"
        )
