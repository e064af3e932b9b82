"""`smkern bench runtime`: what multiplexing gains on a GPU, and what the runtime costs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import click

from smkern.bench.results import Results, cell_key
from smkern.bench.runtime.cases import PLANS, Cell, RuntimePlan, plans_named
from smkern.bench.runtime.rounds import Rounds
from smkern.bench.runtime.rows import gains, renew, summarize
from smkern.bench.runtime.subjects import SUBJECTS, Task, Tasks, subjects_named
from smkern.bench.suite import TIME_LIMIT_OPTION, Output, report, suite_command
from smkern.measure.options import IntList


@dataclass(slots=True)
class RuntimeRun:
    """One run of the suite; the file is written after every task.

    Args:
        results: What the file had.
        output: The file, and until when tasks are begun.
        say: Told a line a cell.
        again: Whether tasks whose cells the file has are run all the same.

    Attributes:
        left: What was not begun before the deadline.
        cut: The same of later rounds.
        before: The cells that the file had.
        rounds: What this run measured.
    """

    results: Results
    output: Output
    say: Callable[[str], None] = click.echo
    again: bool = False
    left: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    before: list[Cell] = field(init=False)
    rounds: Rounds = field(default_factory=Rounds)

    def __post_init__(self) -> None:
        self.before = self.results.cells

    def plan(
        self, plan: RuntimePlan, subjects: Sequence[str], seconds: float, rounds: int = 1
    ) -> None:
        """All subjects of a model, some rounds of them, what they measure with made once."""
        with ExitStack() as stack:
            tasks = Tasks(plan, seconds, stack, self.results)
            for number in range(1, rounds + 1):
                self.rounds.number = number
                if rounds > 1:
                    self.say(f"{plan.model}: round {number} of {rounds}")
                for name in subjects:
                    self.tasks(plan, tasks.of(name))
        del tasks
        gc.collect()  # the next model needs the memory of this one

    def tasks(self, plan: RuntimePlan, tasks: Iterable[Task]) -> None:
        """Run what the file lacks; a task that raises becomes a cell with its error."""
        for task in tasks:
            is_later = self.rounds.number > 1
            if is_later and task.is_once:
                continue
            if self.output.deadline.passed:
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
        self.results.save(self.output.path)

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


@suite_command(
    "runtime",
    click.option("--models", default=None, help="Presets: qwen3-8b,qwen3-32b"),
    click.option("--only", default=None, help=f"Subjects, of: {','.join(SUBJECTS)}"),
    click.option("--rungs", type=IntList(), default=None, help="SMs of the decode side: 16,32,40"),
    click.option("--limits", type=IntList(), default=None, help="TBT limits, ms: 15,20"),
    click.option(
        "--seconds", type=float, default=1.0, show_default=True, help="Of a steady figure."
    ),
    click.option(
        "--rounds", type=click.IntRange(min=1), default=1, show_default=True,
        help="All subjects by turns so often; a cell is the median.",
    ),
    click.option("--again", is_flag=True, help="With --resume, measure what the file has too."),
    TIME_LIMIT_OPTION,
    quick="A short time for each figure of the steady state.",
)  # fmt: skip
def command(
    output: Output,
    *,
    models: str | None,
    only: str | None,
    rungs: tuple[int, ...] | None,
    limits: tuple[int, ...] | None,
    seconds: float,
    rounds: int,
    again: bool,
) -> None:
    """Measure decode beside prefill against chunked prefill, and what the runtime costs."""
    plans = plans_named(models.split(",")) if models else PLANS
    subjects = subjects_named(only)
    run = RuntimeRun(output.open(), output, again=again)
    for plan in plans:
        plan = replace(plan, rungs=rungs or plan.rungs, limits_ms=limits or plan.limits_ms)
        run.plan(plan, subjects, 0.5 if output.quick else seconds, rounds)
    run.save()
    results = run.results
    click.echo(report(results.summary))
    for cell in gains(results.cells):
        click.echo(line_of(cell))
    left = f"; left: {', '.join(run.left)} (go on with --resume)" if run.left else ""
    cut = f"; left of later rounds: {', '.join(run.cut)}" if run.cut else ""
    click.echo(f"{len(results.by_key)} cells in {output.path}{left}{cut}")


if __name__ == "__main__":
    command()
