"""`smkern bench attention`: our paged attention and its peers over cases and SM budgets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.attention.cases import (
    BUDGETS,
    CASES,
    QUICK_BUDGETS,
    QUICK_CASES,
    AttentionCase,
    AttentionGroup,
    cases_named,
)
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.attention.group import AttentionRunner
from smkern.bench.attention.operands import AttentionOperands
from smkern.bench.attention.providers import Peers
from smkern.bench.attention.rows import summarize
from smkern.bench.cases import IntList
from smkern.bench.gemm import Deadline, report
from smkern.bench.named import groups_of
from smkern.bench.power import power_meter
from smkern.bench.results import Results, collect_meta, open_results
from smkern.bench.sitting import Sitting
from smkern.bench.stage import Stage
from smkern.device import device_info, load_profile
from smkern.errors import SmkernError


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

        def operands(case: AttentionCase) -> tuple[AttentionOperands, Peers]:
            ops = AttentionOperands(case)
            return ops, Peers(ops, flashinfer)

        measure = partial(runner.measure, again=again)
        sitting = Sitting(measure, operands, summarize, results, path, deadline, progress)
        return sitting.run(groups)


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
        left = run(groups_of(chosen, counts), results, out, deadline, again=again)
    except (SmkernError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report(results.summary))
    click.echo(f"{len(results.by_key)} cells in {out}; {left} groups left (go on with --resume)")


if __name__ == "__main__":
    command()
