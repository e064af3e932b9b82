"""`smkern bench gemm`: our GEMM and cuBLAS over shapes, rows and SM budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.cases import Group, common_options, gemm_groups
from smkern.bench.group import GroupRunner, note_again
from smkern.bench.power import power_meter
from smkern.bench.providers import OUR_BACKENDS, compile_configs, dispatcher_of, problem_of
from smkern.bench.results import Results, open_results
from smkern.bench.summary import WORST_TARGET, is_losing, summarize
from smkern.device import device_info
from smkern.errors import SmkernError
from smkern.measure.gemm import BUDGETS, MS, SHAPES, GemmOperands, Shape
from smkern.measure.partitions import Partitions, Place, trim_memory
from smkern.measure.provenance import collect_meta
from smkern.tuning.config import GemmConfig, GemmProblem

QUICK_SHAPES = ((6144, 4096),)
QUICK_MS = (64, 2048)
QUICK_BUDGETS = (16, 60, 116)
SAVE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """When to stop measuring, by `time.monotonic()`; None is never."""

    at_s: float | None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        return Deadline(None if seconds is None else time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        return self.at_s is not None and time.monotonic() >= self.at_s


def group_of(cell: dict[str, Any]) -> Group:
    """The group that a gemm cell was measured in."""
    case = cell["case"]
    return Group(case["n"], case["k"], case["m"], cell["group_sms"])


def pending(groups: Sequence[Group], results: Results) -> list[Group]:
    """The groups of which the file has no cell."""
    done = {group_of(cell) for cell in results.cells if cell["op"] == "gemm"}
    return [group for group in groups if group not in done]


def losing(
    groups: Sequence[Group], results: Results, limits: Mapping[str, float] = WORST_TARGET
) -> list[Group]:
    """The groups with a cell that lost to cuBLAS and was not measured again."""
    gemms = [cell for cell in results.cells if cell["op"] == "gemm"]
    lost = {group_of(c) for c in gemms if is_losing(c, limits) and "vs_cublas_again" not in c}
    return [group for group in groups if group in lost]


def by_shape(groups: Sequence[Group]) -> Iterator[tuple[GemmOperands, list[Group]]]:
    """Groups of one (n, k) at a time, with operands that serve all of them."""
    for (n, k), found in groupby(groups, key=lambda group: (group.n, group.k)):
        members = list(found)
        yield GemmOperands(n, k, max(group.m for group in members)), members


@dataclass(slots=True)
class Sitting:
    """One run of the suite; the file is written every few seconds and at the end.

    Args:
        rows: the summary of the cells.
        before: called with a shape before what it launches is chosen.
    """

    runner: GroupRunner
    results: Results
    path: Path
    deadline: Deadline
    progress: Progress
    rows: Callable[[Iterable[dict[str, Any]]], dict[str, Any]] = summarize
    before: Callable[[Shape], None] | None = None
    _saved_s: float = 0.0

    def compile(self, groups: Sequence[Group]) -> None:
        """Compile in parallel what the groups will launch."""
        partitions = self.runner.partitions
        runner = self.runner
        configs: dict[tuple[GemmProblem, GemmConfig], None] = {}
        for shape, members in groupby(groups, key=lambda group: (group.n, group.k)):
            self._choose_for(shape)
            for group in members:
                problem = problem_of(group.n, group.k, group.m)
                wanted: list[tuple[Place, str | None]] = []
                if runner.context:
                    wanted.append((partitions.full, "own"))
                if (place := partitions.at(group.num_sms)) is not None:
                    wanted += [(place, backend) for backend in runner.backends.values()]
                for where, backend in wanted:
                    chosen = runner.dispatcher.select(problem, where.budget, backend)
                    configs[problem, chosen.config] = None
        task = self.progress.add_task("compile", total=None)
        compile_configs(
            runner.dispatcher,
            configs,
            done=lambda done, total: self.progress.update(task, completed=done, total=total),
        )

    def measure(self, groups: Sequence[Group]) -> None:
        task = self.progress.add_task("measure", total=len(groups))
        for ops, members in by_shape(groups):
            self._choose_for((ops.n, ops.k))
            for _, row in groupby(members, key=lambda group: group.m):
                for group in row:
                    if self.deadline.passed:
                        return
                    for cell in self.runner.measure(group, ops):
                        self.results.add(cell)
                    self.progress.advance(task)
                if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                    self.save()
                trim_memory()
        self.save()

    def measure_again(self, groups: Sequence[Group]) -> None:
        """The second result stands beside the first, for every provider of the group."""
        task = self.progress.add_task("again", total=len(groups))
        for ops, members in by_shape(groups):
            for group in members:
                if self.deadline.passed:
                    return
                first = [c for c in self.results.cells if group_of(c) == group]
                for cell in note_again(first, self.runner.measure(group, ops)):
                    self.results.add(cell)
                self.progress.advance(task)
            self.save()

    def _choose_for(self, shape: Shape) -> None:
        if self.before is not None:
            self.before(shape)

    def save(self) -> None:
        self.results.summary = self.rows(self.results.cells)
        self.results.save(self.path)
        self._saved_s = time.monotonic()


def run(
    groups: Sequence[Group],
    results: Results,
    path: Path,
    deadline: Deadline,
    *,
    again: bool,
    backends: Mapping[str, str | None] = OUR_BACKENDS,
    peers: bool = True,
    context: bool = True,
    limits: Mapping[str, float] = WORST_TARGET,
    rows: Callable[[Iterable[dict[str, Any]]], dict[str, Any]] = summarize,
    before: Callable[[Shape], None] | None = None,
) -> int:
    """Measure what `results` lacks, then what lost; how many groups are left.

    Args:
        backends: our providers, by the `backend` of `smkern.gemm`.
        peers, context: see `GroupRunner`.
        limits: by provider, the ratio to cuBLAS under which a cell lost.
        rows, before: see `Sitting`.
    """
    with Partitions({group.num_sms for group in groups}) as partitions, Progress() as progress:
        runner = GroupRunner(
            partitions,
            dispatcher_of(),
            power_meter(),
            backends=backends,
            peers=peers,
            context=context,
        )
        sitting = Sitting(runner, results, path, deadline, progress, rows, before)
        todo = pending(groups, results)
        sitting.compile([*todo, *losing(groups, results, limits)])
        try:
            sitting.measure(todo)
            if again:
                sitting.measure_again(losing(groups, results, limits))
        finally:
            sitting.save()
    lost = losing(groups, results, limits) if again else []
    return len(pending(groups, results)) + len(lost)


def report(summary: dict[str, Any]) -> str:
    """The summary's rows, one a line: value, target, met."""
    lines = []
    for name, row in summary.items():
        parts = row if isinstance(row, dict) and "value" not in row else {"": row}
        for provider, part in parts.items():
            if isinstance(part, dict) and "value" in part:
                met = {True: "met", False: "MISSED", None: ""}[part.get("met")]
                value, target = part["value"], part.get("target", "")
                label = f"{name} {provider}".rstrip()
                lines.append(f"{label:55} {value!s:>9} {target!s:>6} {met} ({part['cells']} cells)")
    return "\n".join(lines)


def conclude(results: Results, path: Path, left: int) -> None:
    """Print what came of a run, and how to go on with the groups that are left."""
    click.echo(report(results.summary))
    click.echo(f"{len(results.by_key)} cells in {path}; {left} groups left (go on with --resume)")


@click.command("gemm")
@common_options("gemm")
@click.option("--time-limit-s", type=float, default=None, help="Stop measuring after so long.")
@click.option("--again/--no-again", default=True, help="Measure losing cells a second time.")
def command(
    out: Path,
    resume: bool,
    quick: bool,
    shapes: Any,
    ms: Any,
    budgets: Any,
    time_limit_s: float | None,
    again: bool,
) -> None:
    """Time smkern.gemm and cuBLAS in SM partitions and on the whole chip.

    Each cell: smkern as dispatched, by its own kernels, by the cost model alone; cuBLAS in the
    spread and the default partition and on the whole chip; our kernel told the wrong budget.
    """
    try:
        total = device_info().num_sms
        groups = gemm_groups(
            shapes or (QUICK_SHAPES if quick else SHAPES),
            ms or (QUICK_MS if quick else MS),
            budgets or (QUICK_BUDGETS if quick else tuple(n for n in BUDGETS if n <= total)),
            streaming=not (quick or budgets),
        )
        results = open_results(out, resume=resume, meta=collect_meta())
        left = run(groups, results, out, Deadline.after(time_limit_s), again=again)
    except SmkernError as error:
        raise click.ClickException(str(error)) from error
    conclude(results, out, left)


if __name__ == "__main__":
    command()
