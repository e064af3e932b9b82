"""`smkern bench ops`: a layer's other operators over cases and SM budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.append.cases import AppendCase
from smkern.bench.append.group import AppendRunner
from smkern.bench.append.operands import AppendOperands
from smkern.bench.append.providers import AppendPeers
from smkern.bench.cases import IntList
from smkern.bench.gemm import Deadline, report
from smkern.bench.named import groups_of
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
from smkern.bench.power import power_meter
from smkern.bench.results import Results, collect_meta, open_results
from smkern.bench.sitting import Sitting
from smkern.bench.stage import Stage
from smkern.device import device_info, load_profile
from smkern.errors import SmkernError

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
    flashinfer, about = find_flashinfer()
    results.meta["flashinfer"] = None if flashinfer is None else about
    if flashinfer is None:
        click.echo(f"without FlashInfer, its cells are left out: {about}", err=True)
    groups = _there(groups, results)
    with Stage({group.num_sms for group in groups}) as stage, Progress() as progress:
        profile, meter = load_profile(), power_meter()
        runner, appends = OpRunner(stage, profile, meter), AppendRunner(stage, profile, meter)
        appends.budget_us = runner.budget_us
        budgets = [place.budget for n in {g.num_sms for g in groups} if (place := stage.at(n))]
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


def _peers_named(text: str) -> tuple[str, ...]:
    """Names apart by commas; ValueError for one that is nobody's."""
    names, known = tuple(name for name in text.split(",") if name), (*PEERS, *SLOW_TO_BUILD)
    for name in names:
        if name not in known:
            raise ValueError(f"no peer is named {name!r}; there are {', '.join(known)}")
    return names


@click.command("ops")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("bench") / "results" / "h200" / "ops.json",
    show_default=True,
    help="Results file.",
)
@click.option("--resume", is_flag=True, help="Keep the file's cells, measure the others.")
@click.option("--quick", is_flag=True, help="Three cases in two budgets: seconds of GPU time.")
@click.option("--cases", default=None, help="Parts of case names: sample,rms_norm-64")
@click.option("--budgets", type=IntList(), default=None, help="SM counts: 16,32 or 16-132:4")
@click.option("--time-limit-s", type=float, default=None, help="Stop measuring after so long.")
@click.option("--peers", default=",".join(PEERS), show_default=True, help="Beside whom.")
@click.option("--again/--no-again", default=True, help="Measure losing groups a second time.")
def command(
    out: Path,
    resume: bool,
    quick: bool,
    cases: str | None,
    budgets: Any,
    time_limit_s: float | None,
    peers: str,
    again: bool,
) -> None:
    """Time a layer's operators in SM partitions and on the whole chip.

    Each group of cells is one operator at one size in one budget: smkern; the sequence of torch's
    operators that it replaces, as it is and compiled; what torch, cuBLAS and FlashInfer have of
    their own, in the spread and in the default partition.
    """
    try:
        total = device_info().num_sms
        chosen = cases_named(cases.split(",")) if cases else (QUICK_CASES if quick else ALL_CASES)
        counts = budgets or tuple(n for n in (QUICK_BUDGETS if quick else BUDGETS) if n <= total)
        results = open_results(out, resume=resume, meta=collect_meta())
        deadline = Deadline.after(time_limit_s)
        groups = groups_of(chosen, counts)
        left = run(groups, results, out, deadline, again=again, peers=_peers_named(peers))
    except (SmkernError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report(results.summary))
    click.echo(f"{len(results.by_key)} cells in {out}; {left} groups left (go on with --resume)")


if __name__ == "__main__":
    command()
