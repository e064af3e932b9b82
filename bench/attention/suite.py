"""`smkern bench attention`: our paged attention and its peers over cases and SM budgets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.attention.cases import (
    BUDGETS,
    CASES,
    QUICK_BUDGETS,
    QUICK_CASES,
    AttentionGroup,
    attention_groups,
    cases_named,
)
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.attention.group import AttentionRunner
from smkern.bench.attention.operands import AttentionOperands
from smkern.bench.attention.providers import Peers
from smkern.bench.attention.rows import summarize
from smkern.bench.cases import IntList
from smkern.bench.gemm import Deadline, report
from smkern.bench.power import power_meter
from smkern.bench.results import Results, collect_meta, open_results
from smkern.bench.stage import Stage, trim_memory
from smkern.device import device_info, load_profile
from smkern.errors import SmkernError

SAVE_EVERY_S = 5.0


def pending(groups: Sequence[AttentionGroup], results: Results) -> list[AttentionGroup]:
    """The groups of which the file has no cell."""
    done = {(cell["case"]["name"], cell["group_sms"]) for cell in results.cells}
    return [group for group in groups if (group.case.name, group.num_sms) not in done]


def by_case(
    groups: Sequence[AttentionGroup], flashinfer: FlashInfer
) -> Iterator[tuple[AttentionOperands, Peers, list[AttentionGroup]]]:
    """Groups of one case at a time, with caches and peers that serve all of them."""
    for case, members in groupby(groups, key=lambda group: group.case):
        ops = AttentionOperands(case)
        yield ops, Peers(ops, flashinfer), list(members)
        trim_memory(0)


@dataclass(slots=True)
class AttentionSitting:
    """One run of the suite; the file is written every few seconds and at the end."""

    runner: AttentionRunner
    results: Results
    path: Path
    deadline: Deadline
    progress: Progress
    again: bool = True
    _saved_s: float = 0.0

    def measure(self, groups: Sequence[AttentionGroup], flashinfer: FlashInfer) -> None:
        task = self.progress.add_task("measure", total=len(groups))
        for ops, peers, members in by_case(groups, flashinfer):
            for group in members:
                if self.deadline.passed:
                    return
                for cell in self.runner.measure(group, ops, peers, again=self.again):
                    self.results.add(cell)
                self.progress.advance(task)
                if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                    self.save()

    def save(self) -> None:
        self.results.summary = summarize(self.results.cells)
        self.results.save(self.path)
        self._saved_s = time.monotonic()


def run(
    groups: Sequence[AttentionGroup],
    results: Results,
    path: Path,
    deadline: Deadline,
    *,
    again: bool,
) -> int:
    """Measure what `results` lacks; how many groups are left."""
    flashinfer = FlashInfer.find()
    results.meta["flashinfer"] = flashinfer.version
    if flashinfer.reason is not None:
        click.echo(f"without FlashInfer, its cells are left out: {flashinfer.reason}", err=True)
    with Stage({group.num_sms for group in groups}) as stage, Progress() as progress:
        runner = AttentionRunner(stage, load_profile(), power_meter())
        sitting = AttentionSitting(runner, results, path, deadline, progress, again)
        try:
            sitting.measure(pending(groups, results), flashinfer)
        finally:
            sitting.save()
    return len(pending(groups, results))


@click.command("attention")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("bench") / "results" / "h200" / "attention.json",
    show_default=True,
    help="Results file.",
)
@click.option("--resume", is_flag=True, help="Keep the file's cells, measure the others.")
@click.option("--quick", is_flag=True, help="Three cases in two budgets: seconds of GPU time.")
@click.option("--cases", default=None, help="Parts of case names: 64x4096,prefill")
@click.option("--budgets", type=IntList(), default=None, help="SM counts: 16,32 or 16-132:4")
@click.option("--time-limit-s", type=float, default=None, help="Stop measuring after so long.")
@click.option("--again/--no-again", default=True, help="Measure losing groups a second time.")
def command(
    out: Path,
    resume: bool,
    quick: bool,
    cases: str | None,
    budgets: Any,
    time_limit_s: float | None,
    again: bool,
) -> None:
    """Time smkern.paged_attention, FlashInfer and SDPA in SM partitions and on the whole chip.

    Each group of cells is one case in one budget: smkern as dispatched and by kernel, under a plan
    made before; FlashInfer's FA2, FA3 and CUDA-core kernels, its plan made before too, and torch's
    SDPA where the case is dense, in the spread and in the default partition; and the plan alone.
    """
    try:
        total = device_info().num_sms
        chosen = cases_named(cases.split(",")) if cases else (QUICK_CASES if quick else CASES)
        counts = budgets or tuple(n for n in (QUICK_BUDGETS if quick else BUDGETS) if n <= total)
        results = open_results(out, resume=resume, meta=collect_meta())
        deadline = Deadline.after(time_limit_s)
        left = run(attention_groups(chosen, counts), results, out, deadline, again=again)
    except (SmkernError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report(results.summary))
    click.echo(f"{len(results.by_key)} cells in {out}; {left} groups left (go on with --resume)")


if __name__ == "__main__":
    command()
