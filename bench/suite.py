"""What the suites' commands share: options, the results file, a deadline, and how a run ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.progress import Progress

from smkern.bench.results import Results, open_results, results_folder
from smkern.bench.rows import Cell, rows_in
from smkern.errors import SmkernError
from smkern.measure.options import IntList, ShapeList, stacked
from smkern.measure.provenance import collect_meta

I = TypeVar("I")  # noqa: E741  an item of a run
SAVE_EVERY_S = 5.0

BUDGETS_OPTION = click.option(
    "--budgets", type=IntList(), default=None, help="SM counts: 16,32 or 16-132:2"
)
MS_OPTION = click.option("--ms", type=IntList(), default=None, help="Rows of the activations.")
GEMM_OPTIONS = (
    click.option("--shapes", type=ShapeList(), default=None, help="Weights, as NxK,NxK."),
    MS_OPTION,
    BUDGETS_OPTION,
)
AGAIN_OPTION = click.option(
    "--again/--no-again", default=True, help="Measure what loses a second time."
)
TIME_LIMIT_OPTION = click.option(
    "--time-limit-s", type=float, default=None, help="Stop measuring after so long."
)


class UnknownNameError(SmkernError, ValueError):
    """A case, a peer or a model that no suite has."""


def known_names(
    names: str | Iterable[str] | None, known: Iterable[str], what: str
) -> tuple[str, ...]:
    """Those of `known` that are named, also in a text apart by commas; all where names are None.

    Raises:
        UnknownNameError: one that is none of `known`; `what` says of what they are names.
    """
    known = tuple(known)
    if names is None:
        return known
    found = [x for x in names.split(",") if x] if isinstance(names, str) else list(names)
    for name in found:
        if name not in known:
            raise UnknownNameError(f"no {what} is named {name!r}; there are {', '.join(known)}")
    return tuple(name for name in known if name in found)


@dataclass(frozen=True, slots=True)
class Deadline:
    """When to stop measuring, by `time.monotonic()`; None is never."""

    at_s: float | None = None

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        return Deadline(None if seconds is None else time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        return self.at_s is not None and time.monotonic() >= self.at_s


@dataclass(frozen=True, slots=True)
class Output:
    """Where a run's results go, and how much of the suite it is: the options of every suite."""

    path: Path
    resume: bool = False
    quick: bool = False
    deadline: Deadline = Deadline()

    def open(self, *, resume: bool = False, **about: Any) -> Results:
        """The file's results to add to, with `resume` or the option, else fresh ones; `about` is
        what their provenance says otherwise."""
        meta = collect_meta() | about
        return open_results(self.path, resume=self.resume or resume, meta=meta)


def file_options(suite: str, *, quick: str) -> Callable[[Any], Any]:
    """The options --out, --resume and --quick, which `quick` is the help of."""
    return stacked(
        click.option(
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            default=lambda: results_folder() / f"{suite}.json",
            show_default=f"bench/results/<this GPU>/{suite}.json",
            help="Results file.",
        ),
        click.option("--resume", is_flag=True, help="Keep the file's cells, measure the others."),
        click.option("--quick", is_flag=True, help=quick),
    )


def suite_command(
    name: str, *options: Callable[[Any], Any], quick: str = "A few cells only: seconds of GPU time."
) -> Callable[[Callable[..., None]], click.Command]:
    """A suite's command: its function gets an `Output` and the values of `options`."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def run(
            out: Path, resume: bool, quick: bool, time_limit_s: float | None = None, **given: Any
        ) -> None:
            function(Output(out, resume, quick, Deadline.after(time_limit_s)), **given)

        every = file_options(name.replace("-", "_"), quick=quick)
        return click.command(name)(stacked(every, *options)(run))

    return decorate


@dataclass(slots=True)
class Run:
    """One run of a suite; the file is written every few seconds and at the end.

    Where nothing was measured, nothing is written.

    Args:
        output: where they are written, and until when to measure.
        summarize: the file's summary, of its cells.
        progress: shows how far it is.

    Attributes:
        errors: why there is no cell, by name; with those of the file that is resumed.
    """

    results: Results
    output: Output
    summarize: Callable[[Sequence[Cell]], dict[str, Any]]
    progress: Progress
    errors: dict[str, str] = field(init=False)
    _saved_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.errors = dict(self.results.summary.get("failed", {}))

    def through(
        self, items: Iterable[I], measure: Callable[[I], Iterable[Cell]], total: int | None = None
    ) -> None:
        """Measure one item after the other until the deadline; `total`: how many, if known."""
        bar = self.progress.add_task("measure", total=total)
        try:
            left = iter(items)
            while not self.output.deadline.passed and (item := next(left, None)) is not None:
                for cell in measure(item):
                    if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                        self.save()  # before it: an item whose cells come together is there whole
                    self.results.add(cell)
                del item  # its operands go before the next ones are made
                self.progress.advance(bar)
        finally:
            self.save()

    def save(self) -> None:
        failed = {"failed": self.errors} if self.errors else {}
        self.results.summary = self.summarize(self.results.cells) | failed
        if self.results.by_key:
            self.results.save(self.output.path)
        self._saved_s = time.monotonic()


def show(results: Results, path: Path) -> None:
    """Print the summary's rows as they are, and how many cells there are."""
    for name, row in results.summary.items():
        click.echo(f"{name}: {row}")
    click.echo(f"{len(results.by_key)} cells in {path}")


def report(summary: dict[str, Any]) -> str:
    """The summary's rows, one a line: value, target, met."""
    lines = []
    for name, row in rows_in(summary):
        met = {True: "met", False: "MISSED", None: ""}[row.get("met")]
        value, target = row["value"], row.get("target", "")
        lines.append(f"{name:55} {value!s:>9} {target!s:>6} {met} ({row['cells']} cells)")
    return "\n".join(lines)


def conclude(results: Results, path: Path, left: int, *, of: str = "groups") -> None:
    """Print what came of a run, and how to go on with what is left."""
    click.echo(report(results.summary))
    click.echo(f"{len(results.by_key)} cells in {path}; {left} {of} left (go on with --resume)")
