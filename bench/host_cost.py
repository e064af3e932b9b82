"""`smkern bench host`: host time of an eager call, of a new budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
from rich.progress import Progress

import smkern
from smkern.bench.cliffs import even_budgets
from smkern.bench.gemm_providers import cublas_call
from smkern.bench.host_timing import host_time
from smkern.bench.plain_launch import plain_launch
from smkern.bench.rows import Cell, cost_cell, has_cell
from smkern.bench.suite import BUDGETS_OPTION, MS_OPTION, Output, Run, suite_command
from smkern.device import Budget, device_info
from smkern.measure.compiling import dispatcher_of
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Partitions
from smkern.measure.timing import Timing
from smkern.partition import current_budget
from smkern.tuning.config import GemmProblem

OP = "gemm_host"
TARGET_US = {"eager": 10.0, "torch_ops": 16.0, "new_budget": 5.0}
PROBES = tuple(
    (m, n, k)
    for m in (128, 256, 16, 64, 512)
    for n, k in ((2048, 1024), (4096, 512), (1024, 4096), (512, 8192))
)
"""Small problems, among which dispatch picks one with whole K loops and one with split ones."""
COUNTED_MS = (*(2**i for i in range(14)), 3, 17, 77, 100, 300, 1000, 1500, 3001, 5000, 8191)
COUNTED_SHAPE = (4096, 4096)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that one function measures; a file that has the last of them has all.

    Attributes:
        measure: Yields them.
        last: What the last one's case says.
        by: Whose the last one is.
    """

    measure: Callable[[], Iterator[Cell]]
    last: Mapping[str, Any]
    by: str = "smkern"


def time_cell(name: str, timing: Timing, target: float | None = None, **about: Any) -> Cell:
    return cost_cell(OP, name, timing.us_median, "us", target, **about)


def call_costs() -> Iterator[Cell]:
    """An eager call, with and without split K, whole device and partition, by every door."""
    total = device_info().num_sms
    with Partitions([32], placements=("spread",)) as partitions:
        place = partitions.at(32)
        for where, stream, budget in (
            ("device", torch.cuda.current_stream(), partitions.full.budget),
            *([("partition", place.stream, place.budget)] if place else []),
        ):
            for split in (False, True):
                problem = _probe(budget, split=split)
                if problem is None:
                    continue
                m, n, k = problem
                ops = GemmOperands(n, k, m, num_sets=4)
                with torch.cuda.stream(stream):
                    yield from _doors(ops, m, where=where, split=split)
    smkern_free = GemmOperands(2048, 1024, 128, num_sets=4)
    peers = {
        "triton": _triton_call(smkern_free, 128, total),
        "cublas": cublas_call(smkern_free, 128),
    }
    for provider, call in peers.items():
        yield time_cell("eager", host_time(call), provider=provider)


def _doors(ops: GemmOperands, m: int, *, where: str, split: bool) -> Iterator[Cell]:
    about: dict[str, Any] = {"where": where, "split": split, "m": m, "n": ops.n, "k": ops.k}
    sets = ops.sets(m)
    weight = sets[0][1]
    gemm, through = smkern.gemm, torch.ops.smkern.gemm_out

    def eager(i: int) -> None:
        a, _, out = sets[i & 3]
        gemm(a, weight, out=out)

    def other_weights(i: int) -> None:
        a, w, out = sets[i & 3]
        gemm(a, w, out=out)

    def by_torch_ops(i: int) -> None:
        a, _, out = sets[i & 3]
        through(a, weight, out)

    yield time_cell("eager", host_time(eager), TARGET_US["eager"], **about)
    yield time_cell("eager_weights_change", host_time(other_weights), **about)
    yield time_cell("torch_ops", host_time(by_torch_ops), TARGET_US["torch_ops"], **about)


def _probe(budget: Budget, *, split: bool) -> tuple[int, int, int] | None:
    """A small problem that dispatch runs by our own kernel with whole, or split, K loops."""
    for m, n, k in PROBES:
        config = dispatcher_of().select(GemmProblem(m, n, k), budget).config
        if config.kernel != "cublaslt" and (config.split != 1) == split:
            return m, n, k
    return None


def budget_costs(counts: Sequence[int], ms: Sequence[int]) -> Iterator[Cell]:
    """A call with another budget each time against the same one; compilations meanwhile."""
    n, k = COUNTED_SHAPE
    whole = current_budget()
    wanted = [
        Budget(count, "grid", whole.clusters) if count < whole.num_sms else whole
        for count in counts
    ]
    warm = smkern.warmup(shapes=[COUNTED_SHAPE], budgets=wanted, max_m=max(ms), progress=False)
    about: dict[str, Any] = {"budgets": len(counts), "variants": warm.variants}
    yield cost_cell(OP, "warmup_seconds", warm.seconds, "s", **about)
    ops = GemmOperands(n, k, max(ms), num_sets=1)
    a, w, out = ops.sets(128)[0]
    before = smkern.counters()
    yield from _change_costs(a, w, out, counts)
    calls = 0
    for m in ms:
        a, w, out = ops.sets(m)[0]
        for count in counts:
            smkern.gemm(a, w, out=out, num_sms=count)
            calls += 1
    torch.cuda.synchronize()
    after = smkern.counters()
    about = {"budgets": len(counts), "rows": len(ms), "calls": calls}
    for name in ("compilations", "module_loads"):
        grown = getattr(after, name) - getattr(before, name)
        yield cost_cell(OP, name, grown, "count", 0, **about)


def _change_costs(a: Any, w: Any, out: Any, counts: Sequence[int]) -> Iterator[Cell]:
    first = []
    for count in counts:
        begin = time.perf_counter_ns()
        smkern.gemm(a, w, out=out, num_sms=count)
        first.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    same = host_time(lambda i: smkern.gemm(a, w, out=out, num_sms=counts[0]))
    number = len(counts)
    change = host_time(lambda i: smkern.gemm(a, w, out=out, num_sms=counts[i % number]))
    cost = change.us_median - same.us_median
    yield cost_cell(OP, "new_budget", cost, "us", TARGET_US["new_budget"], budgets=number)
    yield cost_cell(OP, "same_budget_call", same.us_median, "us")
    yield cost_cell(OP, "changed_budget_call", change.us_median, "us", budgets=number)
    middle = sorted(first)[len(first) // 2]
    yield cost_cell(OP, "first_call_of_a_budget", middle, "us", budgets=number)


def _triton_call(ops: GemmOperands, m: int, num_sms: int) -> Callable[[int], None]:
    sets = ops.sets(m)

    def call(i: int) -> None:
        a, w, out = sets[i & 3]
        plain_launch(a, w, out, num_sms)

    return call


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Rows with a target: how many are met, and the worst of each name."""
    rows = [cell for cell in cells if cell["op"] == OP and "target" in cell]
    worst: dict[str, float] = {}
    for row in rows:
        name = row["case"]["name"]
        worst[name] = max(row["value"], worst.get(name, row["value"]))
    return {"met": sum(row["met"] for row in rows), "of": len(rows), "worst": worst}


@suite_command("host", MS_OPTION, BUDGETS_OPTION)
def command(output: Output, *, ms: Any, budgets: Any) -> None:
    """Time what an eager call and a changed budget cost the host."""
    info = device_info()
    parts = [
        Part(call_costs, {"name": "eager"}, by="cublas"),
    ]
    if not output.quick:
        counts = budgets or even_budgets(info.num_sms, info.sm_granularity)
        rows = ms or COUNTED_MS
        last = {"name": "module_loads", "budgets": len(counts), "rows": len(rows)}
        parts.append(Part(lambda: budget_costs(counts, rows), last))
    results = output.open()
    left = [part for part in parts if not has_cell(results.cells, part.by, part.last)]
    # no thread that redraws the bar: host times are measured
    with Progress(auto_refresh=False) as progress:
        run = Run(results, output, summarize, progress)
        run.through(left, lambda part: part.measure(), len(left))
    for cell in results.cells:
        goal = f" (at most {cell['target']})" if "target" in cell else ""
        click.echo(f"{cell['provider']:8} {cell['case']}: {cell['value']} {cell['unit']}{goal}")
