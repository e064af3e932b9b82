"""`smkern bench runtime`: what multiplexing gains on a GPU, and what the runtime costs."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.results import Results, cell_key
from smkern.bench.rows import has_cell
from smkern.bench.runtime.cases import PLANS, Cell, RuntimePlan, plans_named
from smkern.bench.runtime.rounds import Rounds
from smkern.bench.runtime.rows import gains, renew, summarize
from smkern.bench.runtime.served_load import COMPARED, SERVED_S
from smkern.bench.runtime.subjects import SUBJECTS, Task, Tasks
from smkern.bench.suite import TIME_LIMIT_OPTION, Output, Run, conclude, known_names, suite_command
from smkern.device import device_info
from smkern.measure.options import IntList, Positive
from smkern.measure.timing import first_line
from smkern.policies import POLICIES

Item = tuple[RuntimePlan, Task, int]
"""A model, one of its tasks, and the number of the round, from 1."""


@dataclass(slots=True)
class RuntimeRun:
    """What the suite adds to a `Run`: rounds, and tasks that depend on what others measured.

    Args:
        results: what the file had; gets the cells.
        progress: shows how far it is, and a line a cell.
        again: whether tasks are run whose cells the file has.
    """

    results: Results
    progress: Progress
    again: bool = False
    _before: list[Cell] = field(init=False)
    _rounds: Rounds = field(default_factory=Rounds)

    def __post_init__(self) -> None:
        self._before = self.results.cells

    def items(
        self, plans: Sequence[RuntimePlan], subjects: Sequence[str], rounds: int, **options: Any
    ) -> Generator[Item, None, None]:
        """What is left to measure, one model on the device at a time."""
        for plan in plans:
            yield from self._of_model(plan, subjects, rounds, options)
            gc.collect()  # the next model needs the memory of this one

    def _of_model(
        self, plan: RuntimePlan, subjects: Sequence[str], rounds: int, options: dict[str, Any]
    ) -> Iterator[Item]:
        """Round after round of all subjects; what they measure with is made once."""
        with ExitStack() as stack:
            tasks = Tasks(plan, stack=stack, results=self.results, **options)
            for number in range(1, rounds + 1):
                self._rounds.number = number
                for task in (task for name in subjects for task in tasks.of(name)):
                    if not (number > 1 and task.is_once) and not self._is_done(plan, task):
                        yield plan, task, number

    def measure(self, item: Item) -> Iterator[Cell]:
        """A task's cells; one that raises becomes a cell with its error."""
        plan, task, _ = item
        failed = plan.cell(task.name, task.provider, None, "", **task.about)
        key = cell_key(failed)
        if not self._rounds.has(key):
            self.results.by_key.pop(key, None)
        began = time.monotonic()
        try:
            for cell in task.measure():
                self._say(line_of(cell))
                yield self._rounds.add(key, cell)
            self._rounds.end(key)
        except Exception as error:  # noqa: BLE001  one failed task is a cell, not the end
            message = first_line(error)
            failed |= {"error": message}
            yield from self._rounds.fail(key, message)
            if not self._rounds.is_whole(key):
                yield failed
            self._say(line_of(failed))
        self._say(f"    {task.name}: {time.monotonic() - began:.1f} s")

    def summarize(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """The file's summary, its gains made anew."""
        renew(self.results)
        return summarize(self.results.cells)

    def _is_done(self, plan: RuntimePlan, task: Task) -> bool:
        """Whether the file had its first cell, or another task of this round measured it."""
        wanted = {"model": plan.model, "name": task.name, **task.about}
        cells = (*self._before, *self._rounds.now())
        return not self.again and has_cell(cells, task.provider, wanted)

    def _say(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def run(
    plans: Sequence[RuntimePlan],
    subjects: Sequence[str],
    results: Results,
    output: Output,
    *,
    seconds: float,
    rounds: int = 1,
    again: bool = False,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """Measure what `results` lacks: the tasks that are left, and those of later rounds.

    Args:
        seconds: length of a figure of the steady state.
        rounds: how often all subjects of a model are measured, by turns.
        again: whether tasks are run whose cells the file has.
        options: what else `Tasks` takes.
    """
    # no thread that redraws the bar: host times are measured
    with Progress(auto_refresh=False) as progress:
        own = RuntimeRun(results, progress, again)
        given = {"seconds": seconds, **options}
        with closing(own.items(plans, subjects, rounds, **given)) as items:
            Run(results, output, own.summarize, progress).through(items, own.measure)
            left: tuple[list[str], list[str]] = [], []
            for plan, task, number in items:
                left[number > 1].append(f"{plan.model} {task.name}")
    return left


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
    click.option("--models", default=None, help="Presets: qwen3-8b,qwen3-14b"),
    click.option("--only", default=None, help=f"Subjects, among: {','.join(SUBJECTS)}"),
    click.option("--rungs", type=IntList(), default=None, help="SMs of the decode side: 16,32,40"),
    click.option("--limits", type=IntList(), default=None, help="TBT limits, ms: 15,20"),
    click.option("--policies", default=None, help=f"Who serves: {','.join(COMPARED)}, or any."),
    click.option(
        "--seconds", type=Positive(), default=None,
        help=f"Duration of a figure: 1 of a steady one, {SERVED_S:g} of a served one.",
    ),
    click.option(
        "--rounds", type=click.IntRange(min=1), default=1, show_default=True,
        help="Measure all subjects so often, by turns; a cell is the median.",
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
    policies: str | None,
    seconds: float | None,
    rounds: int,
    again: bool,
) -> None:
    """Measure decode beside prefill against chunked prefill, and what the runtime costs."""
    plans = plans_named(models) if models else PLANS
    subjects = known_names(only or None, SUBJECTS, "subject")
    plans = tuple(
        replace(
            plan,
            rungs=rungs or plan.rungs,
            limits_ms=limits or plan.limits_ms,
            served_ms=limits or plan.served_ms,
        )
        for plan in plans
    )
    serve = known_names(policies, POLICIES, "policy") if policies else COMPARED
    steady_s, served_s = (0.5, 2.0) if output.quick else (seconds or 1.0, seconds or SERVED_S)
    device_info()  # without a GPU an error, before a file is made
    results = output.open()
    left, cut = run(
        plans, subjects, results, output, seconds=steady_s, rounds=rounds, again=again,
        policies=serve, served_s=served_s,
    )  # fmt: skip
    for cell in gains(results.cells):
        click.echo(line_of(cell))
    for title, names in (("left", left), ("left of later rounds", cut)):
        if names:
            click.echo(f"{title}: {', '.join(names)}")
    conclude(results, output.path, len(left), of="tasks")
