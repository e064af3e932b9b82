"""`smkern bench replay-confirm`: simulated goodputs served on the GPU, a little below and above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from smkern.bench.replay.cases import Case, Cell
from smkern.bench.replay.command import PREHEAT_S, Floats
from smkern.bench.replay.grid import TRACES_OPTION, listed
from smkern.bench.replay.measure import BOUND, How, rate_cell
from smkern.bench.replay.rows import pairs, summarize
from smkern.bench.results import Results, cell_key, load_results, reading
from smkern.bench.suite import TIME_LIMIT_OPTION, Output, suite_command
from smkern.measure.options import IntList
from smkern.replay.run import Server

FACTORS = "0.95,1.05"
"""Of the simulated goodput: at the first it should keep its limits, at the second not."""


def chosen(
    cells: Sequence[Cell], *, model: str, traces: Sequence[str], policies: Sequence[str],
    orders: Sequence[str], limits_ms: Sequence[float],
) -> Iterator[Cell]:  # fmt: skip
    """Goodput cells to be confirmed; an empty list of names chooses all."""
    for cell in cells:
        case = cell["case"]
        wanted = (
            (traces, case["trace"]), (policies, cell["provider"]), (orders, case["order"]),
            (limits_ms, case["tbt_slo_ms"]),
        )  # fmt: skip
        is_goodput = cell.get("goodput_rps") and "rate_rps" not in case
        is_goodput = is_goodput and cell["provider"] != BOUND and case["model"] == model
        if is_goodput and all(not names or value in names for names, value in wanted):
            yield cell


def confirm(
    cell: Cell, factor: float, server: Server, folder: Path, preheat_s: float = PREHEAT_S
) -> Cell:
    """The requests with which a goodput was found, at a part of it, served.

    Args:
        cell: The goodput's; of its seeds the first counts.
        factor: Part of its rate.
        server: What serves.
        folder: Where recorded traces lie.
        preheat_s: Other requests come for so long before.
    """
    at, seed, rate = cell["case"], cell["seeds"][0], cell["by_seed"][0]
    case = Case(at["model"], at["trace"], at["tbt_slo_ms"], at["order"], cell["settings"])
    found, _ = rate_cell(
        case, How(arrivals=cell["arrivals"], folder=folder), factor * rate, seed=seed,
        server=server, requests=cell["n"], drain=False, preheat_s=preheat_s,
    )  # fmt: skip
    about = {"factor": factor, "simulated_goodput_rps": rate, "of_policy": cell["provider"]}
    return found | about | {"is_expected": found["is_met"] == (factor < 1.0)}


def short(cell: Cell) -> Cell:
    """A goodput of a window that a GPU serves, told from the table's by its requests."""
    return cell | {"case": cell["case"] | {"requests": cell["n"]}}


def noted(cell: Cell, factor: float, found: Cell) -> Cell:
    """A goodput's cell that says at which parts of it the GPU kept the limits."""
    before = cell.get("confirmed") or {}
    return cell | {"confirmed": before | {f"{factor:g}": found["is_met"]}}


def not_simulated(cells: Sequence[Cell], rungs: tuple[int, ...], folder: Path) -> Iterator[Cell]:
    """What the simulator says to replays that were served: the same requests, rates and rungs."""
    simulated_too = {id(real) for _, real in pairs(cells)}
    for cell in cells:
        at = cell["case"]
        if at.get("where") != "gpu" or id(cell) in simulated_too:
            continue
        limit, policy = at["tbt_slo_ms"], cell["provider"]
        case = Case(at["model"], at["trace"], limit, at["order"], policy)
        found, _ = rate_cell(
            case, How(arrivals=cell["arrivals"], rungs=rungs, folder=folder), at["rate_rps"],
            seed=at["seed"], requests=cell["n"], drain=False,
        )  # fmt: skip
        yield found


def left_of(cells: Sequence[Cell], factors: Sequence[float], results: Results) -> list[Any]:
    """(cell, factor) that the results lack, cells with what they know of the others."""
    found = []
    for cell in cells:
        known = results.by_key.get(cell_key(cell), cell)
        done = known.get("confirmed") or {}
        found += [(cell_key(cell), cell, x) for x in factors if f"{x:g}" not in done]
    return found


@suite_command(
    "replay-confirm",
    click.option(
        "--goodputs",
        required=True,
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="File of smkern bench replay, of the rungs that are captured here.",
    ),
    click.option("--model", default="qwen3-8b", show_default=True),
    click.option("--traces", default=None, help="Default: all in the file; as cells name them."),
    click.option("--policies", default=None, help="Default: all in the file."),
    click.option("--orders", default=None, help="Default: all in the file."),
    click.option("--limits-ms", type=IntList(), default=None, help="Default: all in the file."),
    click.option("--factors", type=Floats(), default=FACTORS, show_default=True),
    click.option("--rungs", type=IntList(), default=None, help="SMs of decode's side of splits."),
    TRACES_OPTION,
    click.option("--simulate", is_flag=True, help="Simulate what --out has from a GPU."),
    TIME_LIMIT_OPTION,
    quick="One cell.",
)
def command(
    output: Output, goodputs: Path, model: str, traces: str | None, policies: str | None,
    orders: str | None, limits_ms: tuple[int, ...] | None, factors: tuple[float, ...],
    rungs: tuple[int, ...] | None, traces_folder: Path, simulate: bool,
) -> None:  # fmt: skip
    """Serve the requests of simulated goodputs on the GPU, at 0.95 and 1.05 of them.

    Goes on where the file ends; one process warms up once and serves them all.
    """
    from smkern.bench.replay.gpu import RUNGS, open_server

    found = chosen(
        load_results(goodputs).cells,
        model=model,
        traces=listed(traces, ()),
        policies=listed(policies, ()),
        orders=listed(orders, ()),
        limits_ms=[float(x) for x in limits_ms or ()],
    )
    with reading(goodputs):
        cells = [short(cell) for cell in found]
    cells = cells[:1] if output.quick else cells
    results = output.open(resume=True)
    if simulate:
        added = [*not_simulated(list(results.cells), tuple(rungs or RUNGS), traces_folder)]
        for made in added:
            results.add(made)
        results.summary = summarize(results.cells)
        results.save(output.path)
        click.echo(f"{len(added)} replays simulated, of those that {output.path} has from a GPU")
        return
    todo = left_of(cells, factors, results)
    if not todo:
        click.echo(f"nothing left of {len(cells)} goodputs")
        return
    left = len(todo)
    with open_server(model, tuple(rungs or RUNGS), click.echo) as server:
        for key, cell, factor in todo:
            if output.deadline.passed:
                break
            made = confirm(cell, factor, server, traces_folder)
            results.add(made)
            results.add(noted(results.by_key.get(key, cell), factor, made))
            results.summary = summarize(results.cells)
            results.save(output.path)
            left -= 1
            click.echo(_line(made))
    click.echo(f"{left} replays left (give the same command again)")


def _line(cell: Cell) -> str:
    case = cell["case"]
    return (
        f"{case['trace']} {case['tbt_slo_ms']:g} ms {case['order']} {cell['provider']} at "
        f"{cell['factor']:g} x {cell['simulated_goodput_rps']:.2f}/s: "
        f"{'kept' if cell['is_met'] else 'not kept'}{'' if cell['is_expected'] else ' (!)'}, "
        f"p99 TBT {cell['tbt_ms']['p99']} ms, gaps {cell['tbt_kept']:.2%}, first tokens "
        f"{cell['ttft_kept']:.2%}, {cell.get('sm_mhz')} MHz, compiled {cell.get('compiled')}, "
        f"graphs missed {cell.get('graphs_missed')}"
    )
