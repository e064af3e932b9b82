"""`smkern bench ops`: a layer's other operators over cases and SM budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.append.group import AppendRunner
from smkern.bench.append.providers import AppendPeers
from smkern.bench.frame import Given, Sizes, suite_options
from smkern.bench.gemm import Deadline
from smkern.bench.ops.cases import (
    ALL_CASES,
    BUDGETS,
    QUICK_BUDGETS,
    QUICK_CASES,
    OpCase,
    OpGroup,
    cases_named,
)
from smkern.bench.ops.group import OpRunner
from smkern.bench.ops.providers import (
    BUILDERS,
    PEERS,
    SLOW_TO_BUILD,
    WITHOUT_FLASHINFER,
    OpPeers,
    compile_gemms,
    find_flashinfer,
    missing,
)
from smkern.bench.ops.rows import summarize
from smkern.bench.peers import noted, peers_named
from smkern.bench.power import power_meter
from smkern.bench.results import Results
from smkern.bench.sitting import Sitting
from smkern.measure.append import AppendCase, AppendOperands
from smkern.measure.partitions import Partitions
from smkern.profile import load_profile

APPEND_PEERS = {"torch": "torch", "torch:compile": "torch:compile", "other": "flashinfer"}
"""The suite's peers, and the append suite's that are theirs."""


def run(
    groups: Sequence[OpGroup],
    results: Results,
    path: Path,
    deadline: Deadline,
    *,
    again: bool,
    peers: tuple[str, ...] = PEERS,
    device: str = "cuda",
) -> int:
    """Measure what `results` lacks; how many groups are left."""
    flashinfer = noted(find_flashinfer(), results.meta)
    groups = _there(groups, results)
    with Partitions({group.num_sms for group in groups}) as partitions, Progress() as progress:
        profile, meter = load_profile(), power_meter()
        runner, appends = (
            OpRunner(partitions, profile, meter),
            AppendRunner(partitions, profile, meter),
        )
        appends.budget_us = runner.budget_us
        budgets = [place.budget for n in {g.num_sms for g in groups} if (place := partitions.at(n))]
        compile_gemms([group.case for group in groups], budgets)

        def operands(case: OpCase | AppendCase) -> tuple[Any, Any]:
            if isinstance(case, AppendCase):
                ops, names = (
                    AppendOperands(case),
                    [APPEND_PEERS[n] for n in peers if n in APPEND_PEERS],
                )
                return ops, AppendPeers(ops, flashinfer, names)
            rivals = BUILDERS[case.op](case, flashinfer, device)
            return rivals, OpPeers(case, rivals, peers)

        def measure(group: Any, ops: Any, theirs: Any) -> list[dict[str, Any]]:
            if isinstance(group.case, AppendCase):
                return appends.measure(group, ops, theirs, again=again)
            return runner.measure(group, theirs, again=again)

        sitting = Sitting(measure, operands, summarize, results, path, deadline, progress)
        return sitting.run(groups)


def _there(groups: Sequence[OpGroup], results: Results) -> list[OpGroup]:
    """The groups of operators that exist; the others, and peers there are none of, are named."""
    ops = dict.fromkeys(group.case.op for group in groups)
    absent = missing(ops)
    results.meta["missing"] = absent
    results.meta["without_flashinfer"] = {
        op: why for op, why in WITHOUT_FLASHINFER.items() if op in ops
    }
    results.meta["left_out_unless_named"] = SLOW_TO_BUILD
    for op, why in absent.items():
        click.echo(f"without {op}: {why}", err=True)
    return [group for group in groups if group.case.op not in absent]


@click.command("ops")
@suite_options(
    "ops",
    quick="Three cases in two budgets: seconds of GPU time.",
    cases="sample,rms_norm-64",
    peers=PEERS,
)
def command(**options: Any) -> None:
    """Time a layer's operators in SM partitions and on the whole chip.

    Each group of cells is one operator at one size in one budget: smkern; the sequence of torch's
    operators that it replaces, as it is and compiled; what torch, cuBLAS and FlashInfer have of
    their own, in the spread and in the default partition.
    """
    given = Given(**options)
    sizes = Sizes(ALL_CASES, QUICK_CASES, BUDGETS, QUICK_BUDGETS, cases_named)

    def measured(groups: list[OpGroup], results: Results, deadline: Deadline) -> int:
        peers = peers_named(given.peers, (*PEERS, *SLOW_TO_BUILD))
        return run(groups, results, given.out, deadline, again=given.again, peers=peers)

    given.measure(sizes, measured)


if __name__ == "__main__":
    command()
