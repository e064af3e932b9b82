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
    AppendCase,
    AppendGroup,
    cases_named,
)
from smkern.bench.append.group import AppendRunner, summarize
from smkern.bench.append.operands import AppendOperands
from smkern.bench.append.providers import PEERS, AppendPeers
from smkern.bench.cases import IntList
from smkern.bench.gemm import Deadline, report
from smkern.bench.named import groups_of
from smkern.bench.power import power_meter
from smkern.bench.results import Results, collect_meta, open_results
from smkern.bench.sitting import Sitting
from smkern.bench.stage import Stage
from smkern.device import device_info, load_profile
from smkern.errors import SmkernError


def find_flashinfer() -> tuple[Any, str | None]:
    """FlashInfer with its version, or None and why it is not there."""
    try:
        import flashinfer
        import flashinfer.norm
        import flashinfer.page
        import flashinfer.rope
    except Exception as error:  # noqa: BLE001  its import runs much; any failure means: without it
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return flashinfer, str(flashinfer.__version__)


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
    flashinfer, about = find_flashinfer()
    results.meta["flashinfer"] = None if flashinfer is None else about
    if flashinfer is None:
        click.echo(f"without FlashInfer, its cells are left out: {about}", err=True)
    with Stage({group.num_sms for group in groups}) as stage, Progress() as progress:
        runner = AppendRunner(stage, load_profile(), power_meter())

        def operands(case: AppendCase) -> tuple[AppendOperands, AppendPeers]:
            ops = AppendOperands(case)
            return ops, AppendPeers(ops, flashinfer, peers)

        measure = partial(runner.measure, again=again)
        sitting = Sitting(measure, operands, summarize, results, path, deadline, progress)
        return sitting.run(groups)


def _peers_named(text: str) -> tuple[str, ...]:
    """Names apart by commas; ValueError for one that is nobody's."""
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in PEERS:
            raise ValueError(f"no peer is named {name!r}; there are {', '.join(PEERS)}")
    return names


@click.command("append")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("bench") / "results" / "h200" / "append.json",
    show_default=True,
    help="Results file.",
)
@click.option("--resume", is_flag=True, help="Keep the file's cells, measure the others.")
@click.option("--quick", is_flag=True, help="Two sizes in two budgets: seconds of GPU time.")
@click.option("--cases", default=None, help="Parts of case names: fp8,norm-rope-64")
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
    """Time smkern.qk_norm_rope_append and append_kv in SM partitions and on the whole chip.

    Each group of cells is one case in one budget: smkern as dispatched; FlashInfer's norm, RoPE and
    append kernels one after another; plain torch and what torch.compile makes of it, in the spread
    and in the default partition. Peers are given positions, pages and slots ready made.
    """
    try:
        total = device_info().num_sms
        chosen = cases_named(cases.split(",")) if cases else (QUICK_CASES if quick else CASES)
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
