"""`smkern bench replay`: goodput of every policy, trace, limit and order, simulated, by many
processes; a run goes on where the file ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from smkern.bench.replay.cases import (
    FOLDER,
    LEAST_REQUESTS,
    LIMITS_MS,
    SECONDS,
    TRACES,
    Case,
    Cell,
    checked_orders,
    checked_policies,
    checked_traces,
    trace_named,
)
from smkern.bench.replay.measure import (
    BOUND,
    How,
    goodput_cell,
    maker,
    server_of,
    specs,
    with_bounds,
)
from smkern.bench.replay.rows import summarize
from smkern.bench.results import Results, cell_key
from smkern.bench.suite import SAVE_EVERY_S, TIME_LIMIT_OPTION, Output, suite_command
from smkern.measure.options import Floats, IntList, Positive
from smkern.policies import ORDERS, POLICIES
from smkern.profile import DEFAULT, load_profile

Work = tuple[Case, str]
"""A case and the settings of its policy that are tried."""
GRACE_S = 45.0


def cases(
    models: Iterable[str],
    traces: Iterable[str],
    limits_ms: Sequence[float],
    orders: Iterable[str],
    policies: Iterable[str],
    paces: Sequence[float] = (),
) -> Iterator[Case]:
    """All cells, the bounds first: each is the same for all limits and policies. With paces those
    of chips that have them, without bounds."""
    models, traces, orders, policies = map(tuple, (models, traces, orders, policies))
    if not paces:
        for model, trace, order in product(models, traces, orders):
            yield Case(model, trace, None, order, BOUND)
    for model, trace in product(models, traces):
        limits = limits_ms or LIMITS_MS[model]
        for limit, order, pace in product(limits, orders, paces or (None,)):
            yield from (Case(model, trace, limit, order, policy, pace) for policy in policies)


@dataclass(slots=True)
class Grid:
    """What of the table is there, and what is tried next.

    A case is done when all settings of its policy were tried; one that failed is tried again by the
    next run. Its settings follow one another: each has to beat the best one so far. Cases are
    independent, and begin at a related one's goodput.

    Args:
        results: The file's cells; gets the new ones.
        cases: The table.
        how: How cases are replayed.

    Attributes:
        failed: Why settings failed in this run.
    """

    results: Results
    cases: Sequence[Case]
    how: How
    failed: dict[Work, str] = field(default_factory=dict)
    _busy: set[Case] = field(default_factory=set)

    def next(self) -> Work | None:
        """Work that nobody does; None: all is done or under way."""
        for case in self.cases:
            if case in self._busy:
                continue
            spec = self._untried(case)
            if spec is not None:
                self._busy.add(case)
                return case, spec
        return None

    def left(self) -> list[Case]:
        """Cases that are not done."""
        return [case for case in self.cases if self._untried(case) is not None]

    def hints(self, work: Work) -> dict[str, Any]:
        """Where a search begins, and what it has to beat."""
        case, _ = work
        cell = self.results.by_key.get(cell_key(case.cell()))
        if cell is not None and cell.get("goodput_rps"):
            return {"near_rps": cell["goodput_rps"], "least_rps": cell["goodput_rps"]}
        return {"near_rps": self._related(case), "least_rps": 0.0}

    def add(self, work: Work, cell: Cell | None, error: str = "") -> None:
        """What came of some work; None: its settings do not beat the best so far."""
        case, spec = work
        self._busy.discard(case)
        key = cell_key(case.cell())
        before = self.results.by_key.get(key)
        tried = dict(before.get("tried", {})) if before else {}
        tried[spec] = error or (0.0 if cell is None else cell["goodput_rps"])
        if error:
            self.failed[work] = error
        is_best = cell is not None and (
            before is None
            or "error" in before
            or cell["goodput_rps"] > before.get("goodput_rps", -1.0)
        )
        best = cell if is_best else before or case.cell() | {"goodput_rps": 0.0, "error": error}
        assert best is not None
        self.results.by_key[key] = best | {"tried": tried}

    def _untried(self, case: Case) -> str | None:
        cell = self.results.by_key.get(cell_key(case.cell()))
        tried = cell.get("tried", {}) if cell else {}

        def is_tried(spec: str) -> bool:
            return (case, spec) in self.failed or isinstance(tried.get(spec), int | float)

        return next((spec for spec in specs(case, self.how.rungs) if not is_tried(spec)), None)

    def _related(self, case: Case) -> float | None:
        """The goodput of the same policy at another order or limit, else of another policy."""
        found: list[tuple[int, float]] = []
        wanted = case.cell()
        for cell in self.results.by_key.values():
            mine, its = wanted["case"], cell["case"]
            if (its["model"], its["trace"]) != (mine["model"], mine["trace"]):
                continue
            if not cell.get("goodput_rps") or BOUND in (cell["provider"], case.policy):
                continue
            far = 2 * (cell["provider"] != case.policy) + (its["order"] != mine["order"])
            far += 4 * (its["tbt_slo_ms"] != mine["tbt_slo_ms"])
            found.append((far, cell["goodput_rps"]))
        return min(found)[1] if found else None


def check(cases: Iterable[Case], how: How) -> None:
    """Raise what ends every replay of a case: no such model, trace, setting of its policy or rung.

    Raises:
        SmkernError: what is wrong, as the replay would say it.
    """
    one_each = {(case.model, case.policy): case for case in cases if case.policy != BOUND}
    for trace in {case.trace for case in one_each.values()}:
        trace_named(trace, how.folder)
    for case in one_each.values():
        server = server_of(case, how)
        server.open(maker(case, specs(case, how.rungs)[0], server)())


def processes(jobs: int) -> ProcessPoolExecutor:
    """Processes that simulate, one thread each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def run(grid: Grid, output: Output, jobs: int) -> None:
    """Try what is left, by so many processes, until the deadline; the file is kept up to date.

    What runs at the deadline has `GRACE_S` to end, then it is given up, and tried again next time.
    """
    saved_s = time.monotonic()
    running: dict[Future[Cell | None], Work] = {}
    with processes(jobs) as pool:
        late_s: float | None = None
        try:
            while True:
                while len(running) < jobs and not output.deadline.passed:
                    work = grid.next()
                    if work is None:
                        break
                    future = pool.submit(
                        goodput_cell, work[0], grid.how, spec=work[1], **grid.hints(work)
                    )
                    running[future] = work
                if output.deadline.passed:
                    late_s = time.monotonic() if late_s is None else late_s
                if not running or (late_s is not None and time.monotonic() - late_s > GRACE_S):
                    break
                for future in wait(running, timeout=2.0, return_when=FIRST_COMPLETED).done:
                    _take(grid, running.pop(future), future)
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    save(grid.results, output.path)
                    saved_s = time.monotonic()
        finally:
            save(grid.results, output.path)
            workers = list((pool._processes or {}).values()) if running else []
            pool.shutdown(wait=not running, cancel_futures=True)
            for process in workers:
                process.terminate()


def _take(grid: Grid, work: Work, future: Future[Cell | None]) -> None:
    case, spec = work
    cell, error = None, ""
    try:
        cell = future.result()
    except Exception as reason:  # noqa: BLE001  one failed case is a cell, not the end
        error = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"
    grid.add(work, cell, error)
    said = error or ("no better" if cell is None else f"{cell['goodput_rps']:.2f}/s")
    limit = "" if case.tbt_slo_ms is None else f" {case.tbt_slo_ms:g} ms"
    took = "" if cell is None else f" ({cell['replays']} replays, {cell['host_s']:.0f} s)"
    click.echo(f"{case.model} {case.trace}{limit} {case.order} {spec}: {said}{took}")


def save(results: Results, path: Path) -> None:
    """Write the file, bounds beside goodputs."""
    for cell in with_bounds(results.cells):
        results.add(cell)
    results.summary = summarize(results.cells)
    results.save(path)


GPU_OPTION = click.option(
    "--sim-gpu",
    "gpu",
    default=DEFAULT,
    show_default=True,
    help="The GPU to simulate: h200 or h100-80gb-hbm3.",
)
TRACES_OPTION = click.option(
    "--traces-folder", type=click.Path(path_type=Path), default=FOLDER, show_default=True,
    help="Folder of the recorded traces azure-conversation, azure-code, mooncake-conversation.",
)  # fmt: skip


SEARCH_OPTIONS = (
    click.option(
        "--seeds", type=click.IntRange(1), default=2, show_default=True, help="Searches of a cell."
    ),
    click.option(
        "--seconds", type=Positive(), default=SECONDS, show_default=True, help="Of a replay."
    ),
    click.option(
        "--least",
        type=click.IntRange(1),
        default=LEAST_REQUESTS,
        show_default=True,
        help="Requests of one.",
    ),
)
"""How goodputs are looked for."""
SIMULATED_OPTIONS = (
    GPU_OPTION,
    click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes."),
    TRACES_OPTION,
    TIME_LIMIT_OPTION,
)
"""What is simulated, where, and for how long."""


def listed(word: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Names of a comma-separated option."""
    return tuple(default) if word is None else tuple(x.strip() for x in word.split(","))


@suite_command(
    "replay",
    click.option("--models", default="qwen3-8b,qwen3-32b", show_default=True),
    click.option("--traces", default=None, help=f"Default: {','.join(TRACES)}; or paths."),
    click.option("--policies", default=None, help="Default: all; settings as in static_split:32."),
    click.option("--orders", default=None, help=f"Default: {','.join(ORDERS)}."),
    click.option("--limits-ms", type=IntList(), default=None, help="Default: each model's own."),
    *SEARCH_OPTIONS,
    click.option("--rungs", type=IntList(), default=None, help="SMs of decode; default: 17 rungs."),
    click.option(
        "--arrivals",
        type=click.Choice(["poisson", "recorded"]),
        default="poisson",
        show_default=True,
    ),
    click.option(
        "--paces",
        type=Floats(),
        default=None,
        help="Of chips whose launches take so many times as long as predicted: 0.97,1,1.06.",
    ),
    *SIMULATED_OPTIONS,
    quick="One trace, one limit, one order.",
)
def command(
    output: Output, models: str, traces: str | None, policies: str | None, orders: str | None,
    limits_ms: tuple[int, ...] | None, seeds: int, seconds: float, least: int,
    rungs: tuple[int, ...] | None, arrivals: Any, paces: tuple[float, ...] | None, gpu: str,
    jobs: int, traces_folder: Path,
) -> None:  # fmt: skip
    """Goodput of every policy on real and generated traces, simulated; its bound beside it.

    The highest rate with p99 of TBT within its limit and 99% of first tokens within the larger of
    1 s and 1 ms for each new token.
    """
    named = checked_traces(listed(traces, ["writing-like"] if output.quick else TRACES))
    table = cases(
        listed(models, ())[:1] if output.quick else listed(models, ()),
        named,
        [30.0] if output.quick else [float(x) for x in limits_ms or ()],
        checked_orders(listed(orders, ["fcfs"] if output.quick else list(ORDERS))),
        checked_policies(listed(policies, list(POLICIES))),
        paces or (),
    )
    how = How(
        tuple(range(seeds)), arrivals, seconds, least, tuple(rungs or ()), folder=traces_folder,
        gpu=gpu,
    )  # fmt: skip
    grid = Grid(output.open(gpu=load_profile(gpu).info.name), list(table), how)
    check(grid.left(), how)
    run(grid, output, jobs)
    click.echo(
        f"{len(grid.results.by_key)} cells in {output.path}; {len(grid.left())} left (--resume)"
    )
    if grid.failed:
        (case, spec), error = next(iter(grid.failed.items()))
        raise click.ClickException(
            f"{len(grid.failed)} failed, and are tried again with --resume: the first was {spec} "
            f"on {case.trace}, {error}"
        )
