"""`smkern bench append`: QK norm, RoPE and the write into pages over cases and SM budgets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.append.cases import (
    BUDGETS,
    CASES,
    QUICK_BUDGETS,
    QUICK_CASES,
    AppendGroup,
    cases_named,
)
from smkern.bench.append.group import AppendRunner, summarize
from smkern.bench.append.providers import PEERS, AppendPeers
from smkern.bench.frame import Given, Sizes, suite_options
from smkern.bench.gemm import Deadline
from smkern.bench.peers import flashinfer_with, noted, peers_named
from smkern.bench.power import power_meter
from smkern.bench.results import Results
from smkern.bench.sitting import Sitting
from smkern.measure.append import AppendCase, AppendOperands
from smkern.measure.partitions import Partitions
from smkern.profile import load_profile

find_flashinfer = partial(flashinfer_with, "norm", "page", "rope")
"""FlashInfer with what the append has a peer of; or None and why it is not there."""


def run(
    groups: Sequence[AppendGroup],
    results: Results,
    path: Path,
    deadline: Deadline,
    *,
    again: bool,
    peers: tuple[str, ...] = PEERS,
) -> int:
    """Measure what `results` lacks; how many groups are left."""
    flashinfer = noted(find_flashinfer(), results.meta)
    with Partitions({group.num_sms for group in groups}) as partitions, Progress() as progress:
        runner = AppendRunner(partitions, load_profile(), power_meter())

        def operands(case: AppendCase) -> tuple[AppendOperands, AppendPeers]:
            ops = AppendOperands(case)
            return ops, AppendPeers(ops, flashinfer, peers)

        measure = partial(runner.measure, again=again)
        sitting = Sitting(measure, operands, summarize, results, path, deadline, progress)
        return sitting.run(groups)


@click.command("append")
@suite_options(
    "append",
    quick="Two sizes in two budgets: seconds of GPU time.",
    cases="fp8,norm-rope-64",
    peers=PEERS,
)
def command(**options: Any) -> None:
    """Time smkern.qk_norm_rope_append and append_kv in SM partitions and on the whole chip.

    Each group of cells is one case in one budget: smkern as dispatched; FlashInfer's norm, RoPE and
    append kernels one after another; plain torch and what torch.compile makes of it, in the spread
    and in the default partition. Peers are given positions, pages and slots ready made.
    """
    given = Given(**options)
    sizes = Sizes(CASES, QUICK_CASES, BUDGETS, QUICK_BUDGETS, cases_named)

    def measured(groups: list[AppendGroup], results: Results, deadline: Deadline) -> int:
        peers = peers_named(given.peers, PEERS)
        return run(groups, results, given.out, deadline, again=given.again, peers=peers)

    given.measure(sizes, measured)


if __name__ == "__main__":
    command()
