"""`smkern bench attention`: our paged attention and its peers over cases and SM budgets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.attention.cases import CASES, QUICK_CASES, AttentionGroup, cases_named
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.attention.group import AttentionRunner
from smkern.bench.attention.providers import Peers
from smkern.bench.attention.rows import summarize
from smkern.bench.frame import Given, Sizes, suite_options
from smkern.bench.gemm import Deadline
from smkern.bench.power import power_meter
from smkern.bench.results import Results
from smkern.bench.sitting import Sitting
from smkern.measure.attention import BUDGETS, QUICK_BUDGETS, AttentionCase, AttentionOperands
from smkern.measure.partitions import Partitions
from smkern.profile import load_profile


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
    with Partitions({group.num_sms for group in groups}) as partitions, Progress() as progress:
        runner = AttentionRunner(partitions, load_profile(), power_meter())

        def operands(case: AttentionCase) -> tuple[AttentionOperands, Peers]:
            ops = AttentionOperands(case)
            return ops, Peers(ops, flashinfer)

        measure = partial(runner.measure, again=again)
        sitting = Sitting(measure, operands, summarize, results, path, deadline, progress)
        return sitting.run(groups)


@click.command("attention")
@suite_options(
    "attention", quick="Three cases in two budgets: seconds of GPU time.", cases="64x4096,prefill"
)
def command(**options: Any) -> None:
    """Time smkern.paged_attention, FlashInfer and SDPA in SM partitions and on the whole chip.

    Each group of cells is one case in one budget: smkern as dispatched and by kernel, under a plan
    made before; FlashInfer's FA2, FA3 and CUDA-core kernels, its plan made before too, and torch's
    SDPA where the case is dense, in the spread and in the default partition; and the plan alone.
    """
    given = Given(**options)
    sizes = Sizes(CASES, QUICK_CASES, BUDGETS, QUICK_BUDGETS, cases_named)

    def measured(groups: list[AttentionGroup], results: Results, deadline: Deadline) -> int:
        return run(groups, results, given.out, deadline, again=given.again)

    given.measure(sizes, measured)


if __name__ == "__main__":
    command()
