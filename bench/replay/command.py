"""`smkern replay`: a trace under policies, simulated or on the GPU, as a table and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import click

from smkern.bench.replay.cases import (
    RUNGS,
    Case,
    Cell,
    checked_orders,
    checked_policies,
    checked_traces,
)
from smkern.bench.replay.grid import GPU_OPTION, TRACES_OPTION, listed
from smkern.bench.replay.measure import (
    MAX_REQUESTS,
    How,
    goodput_cell,
    rate_cell,
    simulated,
)
from smkern.bench.replay.notes import note_goodputs, note_rates, note_table, note_traces
from smkern.bench.replay.own_table import read_own
from smkern.bench.results import Results, cell_key, open_results
from smkern.bench.suite import Deadline
from smkern.device import has_gpu
from smkern.measure.options import Floats, IntList, Positive
from smkern.measure.provenance import collect_meta
from smkern.policies import POLICIES
from smkern.profile import load_profile
from smkern.replay import Served, SimServer
from smkern.replay.comparison import aligned
from smkern.replay.run import Server

MOST_SOUGHT = 100.0
"""No goodput of one GPU is above it, requests/s."""


@click.command("replay")
@click.option("--model", default="qwen3-8b", show_default=True, help="A preset's name.")
@click.option(
    "--trace", "traces", default="conversation-like", show_default=True,
    help="Generated: conversation-like, sharegpt-like, ... (docs/replay.md). Recorded: a .csv in "
    "Azure's format, a .jsonl in Mooncake's, or azure-conversation in --traces-folder.",
)  # fmt: skip
@click.option(
    "--policy", "policies", default=None,
    help="For example chunked,chunked:512,static_split:32,adaptive. Default: all ten.",
)  # fmt: skip
@click.option(
    "--order", "orders", default="fcfs", show_default=True, help="fcfs, deadline, shortest, slack."
)
@click.option("--tbt-ms", type=Floats(), default="30", show_default=True,
              help="Limits of p99 of the time between two tokens (TBT).")  # fmt: skip
@click.option("--rate", "rates", type=Floats(), default=None, help="Requests/s: 4,8,12.")
@click.option("--goodput", "seeks", is_flag=True, help="Seek the highest rate within the limits.")
@click.option("--seconds", type=Positive(), default=60.0, show_default=True,
              help="Length of a replay.")  # fmt: skip
@GPU_OPTION
@click.option("--table", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              default=None,
              help="A latency table of your own, not the shipped one.")  # fmt: skip
@click.option(
    "--simulate/--gpu", "simulates", default=None, help="Default: the GPU where there is one."
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "recorded"]),
    default="poisson",
    show_default=True,
    help="Poisson at the rate, or the trace's own scaled to it.",
)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True)
@click.option(
    "--overlong", type=click.Choice(["drop", "truncate"]), default="drop", show_default=True,
    help="What becomes of requests longer than 40,960 tokens, or the model's context.",
)  # fmt: skip
@click.option("--rungs", type=IntList(), default=None, help="Decode's SMs, of each split.")
@click.option(
    "--drain/--no-drain", default=True,
    help="Whether requests are served to their last token, or to the last arrival alone.",
)  # fmt: skip
@TRACES_OPTION
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=None,
              help="JSON of results; cells that it has are not run again.")  # fmt: skip
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="Folder of pictures.")  # fmt: skip
@click.option("--time-limit-s", type=float, default=None, help="Begin no replay after so long.")
def command(
    model: str, traces: str, policies: str | None, orders: str, tbt_ms: tuple[float, ...],
    rates: tuple[float, ...] | None, seeks: bool, seconds: float, simulates: bool | None,
    arrivals: Any, seeds: tuple[int, ...], overlong: Any, rungs: tuple[int, ...] | None,
    drain: bool, traces_folder: Path, out: Path | None, plots: Path | None,
    time_limit_s: float | None, table: Path | None, gpu: str,
) -> None:  # fmt: skip
    """Replay a trace under policies at given rates, or search each policy's goodput.

    First tokens are due within the larger of 1 s and 1 ms for each new token. Goodput is the
    highest rate at which 99% are, and p99 of the gaps between tokens is within --tbt-ms.
    """
    if bool(rates) == seeks:
        raise click.UsageError("give --rate 4,8,12 or --goodput, one of them")
    rate = max(rates or (MOST_SOUGHT,))
    if seconds * rate > MAX_REQUESTS:
        raise click.UsageError(
            f"--seconds {seconds:g} at {rate:g} requests/s are {seconds * rate:g} requests: give "
            f"less, at most {MAX_REQUESTS:,} together"
        )
    how = How(
        tuple(seeds), arrivals, seconds, rungs=tuple(rungs or ()), overlong=overlong,
        folder=traces_folder,
    )  # fmt: skip
    named = checked_traces(listed(traces, ()))
    # smkern bench replay makes the servers that the oracle and stock kernels want.
    chosen = checked_policies(listed(policies, list(POLICIES)), POLICIES)
    ordered = checked_orders(listed(orders, ()))
    found = [Case(model, *rest) for rest in product(named, tbt_ms, ordered, chosen)]
    if simulates is None:
        simulates = not has_gpu()
    about = {"gpu": load_profile(gpu).info.name} if simulates else {}
    results = Results()
    if out is not None:
        results = open_results(out, resume=True, meta=collect_meta() | about)
    note_table(results, table)
    note_traces(results, named, traces_folder)
    if seeks:
        note_goodputs(results, how, "simulated" if simulates else "gpu")
    else:
        note_rates(results, how, drain)
    deadline = Deadline.after(time_limit_s)
    if simulates:
        click.echo(f"{model} on a simulated {about['gpu']}")
    runner = _Runner(results, out, how, deadline)
    with _server(model, gpu if simulates else None, how.rungs, table) as server:
        if seeks:
            runner.goodputs(found, server)
        else:
            runner.rates(found, rates or (), server, drain)
    _print(results, found)
    if plots is not None:
        for path in _draw(results, runner.served, found, plots):
            click.echo(str(path))
    if runner.left:
        click.echo(f"{runner.left} replays left: give the same command again with --out")


class _Runner:
    """Runs what the results lack, and keeps them up to date."""

    def __init__(self, results: Results, out: Path | None, how: How, deadline: Deadline) -> None:
        self.served: list[Served] = []
        self.left = 0
        self._results = results
        self._out = out
        self._how = how
        self._deadline = deadline

    def goodputs(self, cases: Sequence[Case], server: Server) -> None:
        for case in cases:
            known = self._results.by_key.get(cell_key(case.cell()))
            if known is not None and known.get("goodput_rps") is not None:
                continue
            if self._deadline.passed:
                self.left += 1
                continue
            cell = goodput_cell(case, self._how, server=server)
            assert cell is not None
            said = f"{cell['goodput_rps']:.2f} requests/s, {cell['replays']} replays"
            if not cell["goodput_rps"]:
                said = (
                    f"keeps its limits at no rate: at {cell['lowest_rps']:.2f}/s, "
                    f"{cell['lowest_stopped'] or 'to the end'}, p99 TBT was "
                    f"{cell['lowest_tbt_p99_ms']} ms; give a longer limit, or another order"
                )
            self._keep(cell, said)

    def rates(
        self, cases: Sequence[Case], rates: Sequence[float], server: Server, drain: bool
    ) -> None:
        where = "simulated" if isinstance(server, SimServer) else "gpu"
        preheat_s = 0.0 if where == "simulated" else PREHEAT_S
        for case, rate, seed in product(cases, rates, self._how.seeds):
            about = {"rate_rps": round(rate, 4), "seed": seed, "where": where}
            if cell_key(case.cell(**about)) in self._results.by_key:
                continue
            if self._deadline.passed:
                self.left += 1
                continue
            cell, served = rate_cell(
                case, self._how, rate, seed=seed, server=server, keep=True, drain=drain,
                preheat_s=preheat_s,
            )  # fmt: skip
            self.served.append(served)
            self._keep(cell, f"{rate:g}/s: {cell['slo_attainment']:.2%} within the limits")

    def _keep(self, cell: Cell, said: str) -> None:
        case = cell["case"]
        click.echo(
            f"{case['trace']} {case['tbt_slo_ms']:g} ms {case['order']} {cell['provider']} {said}"
        )
        if cell["overlong"]:
            what = "dropped" if self._how.overlong == "drop" else "cut"
            click.echo(f"  {cell['overlong']} requests longer than the context were {what}")
        self._results.add(cell)
        if self._out is not None:
            self._results.save(self._out)


@contextmanager
def _server(
    model: str, gpu: str | None, rungs: tuple[int, ...], table: Path | None
) -> Iterator[Server]:
    """The simulated GPU of that name; None: the one that is here."""
    own = None if table is None else read_own(table, model, load_profile(gpu))
    if gpu is not None:
        yield simulated(model, rungs, gpu=gpu, predictor=own)
        return
    from smkern.bench.replay.gpu import open_server

    with open_server(model, rungs or RUNGS, click.echo, predictor=own) as server:
        yield server


PREHEAT_S = 5.0
COLUMNS = (
    ("TTFT p50", "ttft_ms", "p50"), ("p99", "ttft_ms", "p99"), ("TBT p50", "tbt_ms", "p50"),
    ("p99", "tbt_ms", "p99"), ("worst gap p99", "worst_gap_ms", "p99"),
)  # fmt: skip


def _print(results: Results, cases: Sequence[Case]) -> None:
    """A row a cell of these cases; times in ms."""
    heads = ["times in ms", "TBT limit", "order", "policy", "requests/s"]
    rows = [(*heads, *(column[0] for column in COLUMNS), "in TBT", "in TTFT", "done/s")]
    for cell in _cells_of(results, cases):
        case = cell["case"]
        rate = case.get("rate_rps", cell.get("goodput_rps"))
        row = [case["trace"], f"{case['tbt_slo_ms']:g}", case["order"], cell["provider"]]
        row += [f"{rate:.2f}"]
        row += [_figure(cell.get(name, {}).get(part)) for _, name, part in COLUMNS]
        row += [_share(cell.get("tbt_kept")), _share(cell.get("ttft_kept"))]
        rows.append((*row, _figure(cell.get("requests_per_s"))))
    for line in aligned(rows):
        click.echo(line)


def _cells_of(results: Results, cases: Sequence[Case]) -> list[Cell]:
    wanted = [(case.cell()["case"], case.policy) for case in cases]
    return [
        cell
        for case, policy in wanted
        for cell in results.cells
        if cell["provider"] == policy and case.items() <= cell["case"].items()
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _draw(
    results: Results, served: Sequence[Served], cases: Sequence[Case], folder: Path
) -> Iterator[Path]:
    """Attainment and latency over the rate or goodput over the limit, and the split over time."""
    from smkern.bench.plots.replay import limits_picture, rates_pictures
    from smkern.panels import write
    from smkern.replay.plots import draw_splits

    cells = _cells_of(results, cases)
    for picture in (*rates_pictures(cells), *limits_picture(cells)):
        yield write(picture, folder)
    if served:
        yield draw_splits(served[:9], folder / "replay-split.png")
