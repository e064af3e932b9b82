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

from smkern.bench.results import Results, cell_key, open_results
from smkern.bench.runtime.cases import PLANS, Cell, RuntimePlan, plans_named
from smkern.bench.runtime.rounds import Rounds
from smkern.bench.runtime.rows import gains, renew, summarize
from smkern.bench.runtime.subjects import SUBJECTS, Task, Tasks
from smkern.bench.suite import Deadline, file_options, report
from smkern.errors import SmkernError
from smkern.measure.options import IntList
from smkern.measure.provenance import collect_meta


@dataclass(slots=True)
class RuntimeSitting:
    """One run of the suite; the file is written after every task.

    Args:
        results: What the file had.
        path: The file.
        deadline: When no further task is begun.
        say: Told a line a cell.
        again: Whether tasks whose cells the file has are run all the same.

    Attributes:
        left: What was not begun before the deadline.
        cut: The same of later rounds.
        before: The cells that the file had.
        rounds: What this run measured.
    """

    results: Results
    path: Path
    deadline: Deadline
    say: Callable[[str], None] = click.echo
    again: bool = False
    left: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    before: list[Cell] = field(init=False)
    rounds: Rounds = field(default_factory=Rounds)

    def __post_init__(self) -> None:
        self.before = self.results.cells

    def run(self, plan: RuntimePlan, tasks: Iterable[Task]) -> None:
        """Run what the file lacks; a task that raises is a cell that says why."""
        for task in tasks:
            is_later = self.rounds.number > 1
            if is_later and task.is_once:
                continue
            if self.deadline.passed:
                (self.cut if is_later else self.left).append(f"{plan.model} {task.name}")
                continue
            if not self.again and self._is_done(plan, task):
                continue
            began = time.monotonic()
            self._measure(plan, task)
            self.say(f"    {task.name}: {time.monotonic() - began:.1f} s")
            self.save()

    def _measure(self, plan: RuntimePlan, task: Task) -> None:
        failed = plan.cell(task.name, task.provider, None, "", **task.about)
        key = cell_key(failed)
        if not self.rounds.has(key):
            self.results.by_key.pop(key, None)
        try:
            for cell in task.measure():
                self.results.add(self.rounds.add(key, cell))
                self.say(line_of(cell))
            self.rounds.end(key)
        except Exception as error:  # noqa: BLE001  one failed task is a cell, not the end
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            failed |= {"error": message}
            for cell in self.rounds.fail(key, message):
                self.results.add(cell)
            if not self.rounds.is_whole(key):
                self.results.add(failed)
            self.say(line_of(failed))

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
            for cell in (*self.before, *self.rounds.now())
        )


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
    rounds: int = 1,
) -> None:
    """All subjects of a model, some rounds of them, that what they measure with made once."""
    with ExitStack() as stack:
        tasks = Tasks(plan, seconds, stack, sitting.results)
        for number in range(1, rounds + 1):
            sitting.rounds.number = number
            if rounds > 1:
                sitting.say(f"{plan.model}: round {number} of {rounds}")
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
@click.option(
    "--rounds", type=click.IntRange(min=1), default=1, show_default=True,
    help="All subjects by turns so often; a cell is the median.",
)  # fmt: skip
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
    rounds: int,
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
            run_plan(sitting, plan, subjects, 0.5 if quick else seconds, rounds)
        sitting.save()
    except (SmkernError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report(results.summary))
    for cell in gains(results.cells):
        click.echo(line_of(cell))
    left = f"; left: {', '.join(sitting.left)} (go on with --resume)" if sitting.left else ""
    cut = f"; left of later rounds: {', '.join(sitting.cut)}" if sitting.cut else ""
    click.echo(f"{len(results.by_key)} cells in {out}{left}{cut}")


NOW_TESTS = {
    "tokens": "tests/gpu/runtime/test_bit_equal.py",
    "soak": "tests/gpu/runtime/test_soak.py",
}
"""Rows of the suite's file that are a test's, by the subject that they were."""


def subjects_named(only: str | None) -> tuple[str, ...]:
    """The subjects of that name, all where none is given.

    Raises:
        ValueError: a name that is no subject's.
    """
    if not only:
        return tuple(SUBJECTS)
    names = tuple(name for name in only.split(",") if name)
    for name in names:
        if name in NOW_TESTS:
            raise ValueError(
                f"{name!r} is measured by a test: SMKERN_RESULTS=<results file> python -m pytest "
                f"{NOW_TESTS[name]}, in a checkout; there are {', '.join(SUBJECTS)} here"
            )
        if name not in SUBJECTS:
            raise ValueError(f"no subject is named {name!r}; there are {', '.join(SUBJECTS)}")
    return tuple(name for name in SUBJECTS if name in names)


if __name__ == "__main__":
    command()
