"""From a command's options to a results file: what the suites of named cases share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from smkern.bench.cases import file_options
from smkern.bench.gemm import Deadline, conclude
from smkern.bench.named import Group, Named, groups_of
from smkern.bench.results import Results, open_results
from smkern.device import device_info
from smkern.errors import SmkernError
from smkern.measure.options import IntList, stacked
from smkern.measure.provenance import collect_meta

C = TypeVar("C", bound=Named)

Run = Callable[[list[Group[C]], Results, Deadline], int]
"""Measures what the results lack; how many groups are left."""


@dataclass(frozen=True, slots=True)
class Sizes(Generic[C]):
    """What a suite measures, what with `--quick`, and its cases by parts of their names."""

    cases: Sequence[C]
    quick_cases: Sequence[C]
    budgets: Sequence[int]
    quick_budgets: Sequence[int]
    cases_named: Callable[[Iterable[str]], Sequence[C]]


@dataclass(frozen=True, slots=True)
class Given:
    """What a suite's command was given; `peers` by commas."""

    out: Path
    resume: bool
    quick: bool
    cases: str | None
    budgets: tuple[int, ...] | None
    time_limit_s: float | None
    again: bool
    peers: str = ""

    def groups(self, sizes: Sizes[C], total: int) -> list[Group[C]]:
        """Every case asked for in every budget; of a suite's own budgets those of `total` SMs."""
        most = sizes.quick_cases if self.quick else sizes.cases
        chosen = sizes.cases_named(self.cases.split(",")) if self.cases else most
        budgets = sizes.quick_budgets if self.quick else sizes.budgets
        return groups_of(chosen, self.budgets or tuple(n for n in budgets if n <= total))

    def measure(self, sizes: Sizes[C], run: Run[C]) -> None:
        """Measure what was asked for, and say what came of it.

        Raises:
            ClickException: an option that names nothing, a file or a device that will not do.
        """
        try:
            groups = self.groups(sizes, device_info().num_sms)
            results = open_results(self.out, resume=self.resume, meta=collect_meta())
            left = run(groups, results, Deadline.after(self.time_limit_s))
        except (SmkernError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        conclude(results, self.out, left)


def suite_options(
    suite: str, *, quick: str, cases: str, peers: Sequence[str] | None = None
) -> Callable[[Any], Any]:
    """The options of such a suite, `Given`'s fields: `quick` is a help, `cases` an example of one.

    `peers`: who takes part unless named; None where nobody can be named.
    """
    beside = click.option(
        "--peers", default=",".join(peers or ()), show_default=True, help="Beside whom."
    )
    return stacked(
        file_options(suite, quick=quick),
        click.option("--cases", default=None, help=f"Parts of case names: {cases}"),
        click.option(
            "--budgets", type=IntList(), default=None, help="SM counts: 16,32 or 16-132:4"
        ),
        click.option(
            "--time-limit-s", type=float, default=None, help="Stop measuring after so long."
        ),
        *([] if peers is None else [beside]),
        click.option(
            "--again/--no-again", default=True, help="Measure losing groups a second time."
        ),
    )
