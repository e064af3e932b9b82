"""`smkern bench replay-confirm`: simulated goodputs served on the GPU, a little below and above.

Chips of one kind differ by more than that, so the goodputs are simulated for the chip that serves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from smkern.bench.replay.cases import RUNGS, Case, Cell
from smkern.bench.replay.command import PREHEAT_S
from smkern.bench.replay.grid import TRACES_OPTION, listed, processes
from smkern.bench.replay.measure import BOUND, How, goodput_cell, rate_cell
from smkern.bench.replay.rows import pairs, summarize
from smkern.bench.results import Results, cell_key, load_results, reading
from smkern.bench.suite import TIME_LIMIT_OPTION, Output, suite_command
from smkern.device import gpu_folder
from smkern.measure.options import Floats, IntList
from smkern.replay.run import Server

FACTORS = "0.95,1.05"
"""Of the simulated goodput: at the first it should keep its limits, at the second not."""
PACE_AT, PACE_S, PACE_SEED = 1.0, 12.0, 2000
"""The pace of a chip is measured at this part of a goodput, for so long, with other requests. At
0.85 an H200 was cooler and 0 to 3% faster than at 0.95, where 1% moves first tokens by a tenth."""

Place = tuple[str, str, float, str, str]
"""Model, trace, limit, order, policy."""


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
        is_goodput = cell.get("goodput_rps") and {"rate_rps", "pace"}.isdisjoint(case)
        is_goodput = is_goodput and cell["provider"] != BOUND and case["model"] == model
        if is_goodput and all(not names or value in names for names, value in wanted):
            yield cell


def case_of(cell: Cell, policy: str) -> Case:
    """What a cell was replayed as, with settings of its policy."""
    at = cell["case"]
    return Case(at["model"], at["trace"], at["tbt_slo_ms"], at["order"], policy, at.get("pace"))


def pace_here(cell: Cell, server: Server, folder: Path, preheat_s: float = PREHEAT_S) -> float:
    """How many times as long as predicted launches take on the chip that serves: in chunks, at the
    rate of a goodput and with other requests.

    Args:
        cell: The goodput's, by what the table predicts.
        server: What serves.
        folder: Where recorded traces lie.
        preheat_s: Other requests come for so long before.
    """
    rate = PACE_AT * cell["by_seed"][0]
    found, _ = rate_cell(
        case_of(cell, "chunked"), How(arrivals=cell["arrivals"], folder=folder), rate,
        seed=cell["seeds"][0] + PACE_SEED, server=server, requests=max(20, round(PACE_S * rate)),
        drain=False, preheat_s=preheat_s,
    )  # fmt: skip
    return float(found["pace"])


def at_pace(cell: Cell, pace: float, rungs: tuple[int, ...], folder: Path, gpu: str) -> Cell:
    """A goodput as it is simulated where launches take so many times as long."""
    case = replace(case_of(cell, cell["settings"]), pace=pace)
    seeds, arrivals = tuple(cell["seeds"][:1]), cell["arrivals"]
    how = How(seeds, arrivals, seconds=0.0, least=cell["n"], rungs=rungs, folder=folder, gpu=gpu)
    found = goodput_cell(case, how, near_rps=cell["by_seed"][0] / pace)
    assert found is not None
    return short(found | {"provider": cell["provider"]})


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
    seed, rate = cell["seeds"][0], cell["by_seed"][0]
    found, _ = rate_cell(
        case_of(cell, cell["settings"]), How(arrivals=cell["arrivals"], folder=folder),
        factor * rate, seed=seed, server=server, requests=cell["n"], drain=False,
        preheat_s=preheat_s,
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


def not_simulated(
    cells: Sequence[Cell], rungs: tuple[int, ...], folder: Path, gpu: str
) -> Iterator[Cell]:
    """What the simulator says to replays that were served: the same requests, rates and rungs."""
    simulated_too = {id(real) for _, real in pairs(cells)}
    for cell in cells:
        at = cell["case"]
        if at.get("where") != "gpu" or id(cell) in simulated_too:
            continue
        how = How(arrivals=cell["arrivals"], rungs=rungs, folder=folder, gpu=gpu)
        found, _ = rate_cell(
            case_of(cell, cell["provider"]), how, at["rate_rps"], seed=at["seed"],
            requests=cell["n"], drain=False,
        )  # fmt: skip
        yield found


def simulated_here(results: Results) -> dict[Place, Cell]:
    """The goodputs of this chip that results have."""
    return {
        _place(cell): cell for cell in results.cells if {"pace", "requests"} <= cell["case"].keys()
    }


def paced(
    cells: Sequence[Cell], results: Results, server: Server, rungs: tuple[int, ...], folder: Path,
    gpu: str,
) -> list[Cell]:  # fmt: skip
    """Goodputs of the chip that serves, for goodputs by what the table predicts.

    The results have those of an earlier call on the same chip. Its pace is measured for each trace
    and limit, and the others are simulated by it, all at once.
    """
    known = simulated_here(results)
    paces = {place[1:3]: cell["case"]["pace"] for place, cell in known.items()}
    left = [cell for cell in cells if _place(cell) not in known]
    for cell in left:
        at = _place(cell)[1:3]
        if at not in paces:
            paces[at] = pace_here(cell, server, folder)
            click.echo(f"{at[0]}, {at[1]:g} ms: launches take {paces[at]:g} of what is predicted")
    if left:
        simulate = partial(at_pace, rungs=rungs, folder=folder, gpu=gpu)
        jobs = min(len(left), os.cpu_count() or 1)
        with processes(jobs) as pool:
            for cell in pool.map(simulate, left, [paces[_place(cell)[1:3]] for cell in left]):
                results.add(cell)
                known[_place(cell)] = cell
    return [known[_place(cell)] for cell in cells]


def _place(cell: Cell) -> Place:
    at = cell["case"]
    return at["model"], at["trace"], at["tbt_slo_ms"], at["order"], cell["provider"]


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

    First it measures how long launches take here, and simulates the goodputs again by that. Goes on
    where the file ends, on the same GPU; one process warms up once and serves them all.
    """
    from smkern.bench.replay.gpu import open_server

    rungs = tuple(rungs or RUNGS)
    simulated = load_results(goodputs)
    found = chosen(
        simulated.cells,
        model=model,
        traces=listed(traces, ()),
        policies=listed(policies, ()),
        orders=listed(orders, ()),
        limits_ms=[float(x) for x in limits_ms or ()],
    )
    with reading(goodputs):
        cells, gpu = list(found), gpu_folder(simulated.meta["gpu"])
    cells = cells[:1] if output.quick else cells
    results = output.open(resume=True)
    if simulate:
        added = [*not_simulated(list(results.cells), rungs, traces_folder, gpu)]
        for made in added:
            results.add(made)
        results.summary = summarize(results.cells)
        results.save(output.path)
        click.echo(f"{len(added)} replays simulated, of those that {output.path} has from a GPU")
        return
    known = simulated_here(results)
    here = [known[_place(cell)] for cell in cells if _place(cell) in known]
    if len(here) == len(cells) and not left_of(here, factors, results):
        click.echo(f"nothing left of {len(cells)} goodputs")
        return
    with open_server(model, rungs, click.echo) as server:
        todo = left_of(paced(cells, results, server, rungs, traces_folder, gpu), factors, results)
        left = len(todo)
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
