"""`smkern bench runtime`: what multiplexing gains on a GPU, and what the runtime costs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from smkern.bench.cases import IntList, file_options
from smkern.bench.gemm import Deadline, report
from smkern.bench.results import Results, cell_key, collect_meta, open_results
from smkern.bench.runtime.cases import PLANS, Cell, RuntimePlan, plans_named
from smkern.bench.runtime.rows import gains, renew, summarize
from smkern.bench.runtime.subjects import SUBJECTS, Task, Tasks
from smkern.errors import SmkernError


@dataclass(slots=True)
class RuntimeSitting:
    """One run of the suite; the file is written after every task.

    Args:
        results: What the file had.
        path: The file.
        deadline: When no further task is begun.
        say: Told a line a cell.
        again: Whether tasks whose cells the file has are run all the same.
    """

    results: Results
    path: Path
    deadline: Deadline
    say: Callable[[str], None] = click.echo
    again: bool = False
    left: list[str] = field(default_factory=list)

    def run(self, plan: RuntimePlan, tasks: Iterable[Task]) -> None:
        """Run what the file lacks; a task that raises is a cell that says why."""
        for task in tasks:
            if self.deadline.passed:
                self.left.append(f"{plan.model} {task.name}")
                continue
            if not (self.again or task.is_again) and self._is_done(plan, task):
                continue
            began = time.monotonic()
            failed = plan.cell(task.name, task.provider, None, "", **task.about)
            self.results.by_key.pop(cell_key(failed), None)
            try:
                for cell in task.measure():
                    self._add(cell)
            except Exception as error:  # noqa: BLE001  one failed task is a cell, not the end
                message = f"{type(error).__name__}: {error}".splitlines()[0]
                self._add(failed | {"error": message})
            self.say(f"    {task.name}: {time.monotonic() - began:.1f} s")
            self.save()

    def save(self) -> None:
        renew(self.results)
        self.results.summary = summarize(self.results.cells)
        self.results.save(self.path)

    def _is_done(self, plan: RuntimePlan, task: Task) -> bool:
        wanted = {"model": plan.model, "name": task.name, **task.about}
        return any(
            cell["provider"] == task.provider
            and wanted.items() <= cell["case"].items()
            and not cell.get("error")
            for cell in self.results.cells
        )

    def _add(self, cell: Cell) -> None:
        self.results.add(cell)
        self.say(line_of(cell))


def line_of(cell: Cell) -> str:
    """A cell in a line: its case, its value, and what else it says in figures."""
    case = " ".join(f"{k}={v}" for k, v in cell["case"].items() if k not in ("model", "name"))
    more = " ".join(
        f"{name}={value}"
        for name, value in cell.items()
        if name not in ("op", "case", "provider", "value", "unit") and not isinstance(value, list)
    )
    head = f"{cell['case']['model']} {cell['case']['name']} {case} [{cell['provider']}]"
    return f"{head} {cell['value']} {cell['unit']}  {more}"


def run_plan(
    sitting: RuntimeSitting,
    plan: RuntimePlan,
    subjects: Sequence[str],
    seconds: float,
    soak_s: float,
) -> None:
    """All subjects of a model, that what they measure with made once."""
    with ExitStack() as stack:
        tasks = Tasks(
            plan, seconds, stack, sitting.path.with_suffix(".soak"), soak_s, sitting.results
        )
        for name in subjects:
            sitting.run(plan, tasks.of(name))
    del tasks
    gc.collect()  # the next model needs the memory of this one


def options_of(plans: Sequence[RuntimePlan], **given: Any) -> Iterator[RuntimePlan]:
    """The plans with what was given on the command line."""
    changed = {name: value for name, value in given.items() if value is not None}
    for plan in plans:
        yield replace(plan, **changed)


@click.command("runtime")
@file_options("runtime", quick="A short time for each figure of the steady state.")
@click.option("--models", default=None, help="Presets: qwen3-8b,qwen3-32b")
@click.option("--only", default=None, help=f"Subjects, of: {','.join(SUBJECTS)}")
@click.option("--rungs", type=IntList(), default=None, help="SMs of the decode side: 16,32,40")
@click.option("--limits", type=IntList(), default=None, help="TBT limits, ms: 15,20")
@click.option("--seconds", type=float, default=1.0, show_default=True, help="Of a steady figure.")
@click.option("--soak-s", type=float, default=60.0, show_default=True, help="Of a soak's segment.")
@click.option("--again", is_flag=True, help="With --resume, measure what the file has too.")
@click.option("--time-limit-s", type=float, default=None, help="Begin nothing after so long.")
def command(
    out: Path,
    resume: bool,
    quick: bool,
    models: str | None,
    only: str | None,
    rungs: tuple[int, ...] | None,
    limits: tuple[int, ...] | None,
    seconds: float,
    soak_s: float,
    again: bool,
    time_limit_s: float | None,
) -> None:
    """Measure decode beside prefill against chunked prefill, and what the runtime costs."""
    try:
        plans = plans_named(models.split(",")) if models else PLANS
        subjects = subjects_named(only)
        results = open_results(out, resume=resume, meta=collect_meta())
        sitting = RuntimeSitting(results, out, Deadline.after(time_limit_s), again=again)
        for plan in options_of(plans, rungs=rungs, limits_ms=limits):
            run_plan(sitting, plan, subjects, 0.5 if quick else seconds, soak_s)
        sitting.save()
    except (SmkernError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report(results.summary))
    for cell in gains(results.cells):
        click.echo(line_of(cell))
    left = f"; left: {', '.join(sitting.left)} (go on with --resume)" if sitting.left else ""
    click.echo(f"{len(results.by_key)} cells in {out}{left}")


def subjects_named(only: str | None) -> tuple[str, ...]:
    """The subjects of that name, all where none is given.

    Raises:
        ValueError: a name that is no subject's.
    """
    if not only:
        return tuple(SUBJECTS)
    names = tuple(name for name in only.split(",") if name)
    for name in names:
        if name not in SUBJECTS:
            raise ValueError(f"no subject is named {name!r}; there are {', '.join(SUBJECTS)}")
    return tuple(name for name in SUBJECTS if name in names)


if __name__ == "__main__":
    command()
