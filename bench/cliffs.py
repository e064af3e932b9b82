"""`smkern bench cliffs`: every even budget; more SMs are never slower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from smkern.bench.cases import Group, common_options
from smkern.bench.cells import ceiling_of, failed_cell, measured_cell
from smkern.bench.check import complaint
from smkern.bench.cliff_rules import judge, to_measure_again
from smkern.bench.power import PowerMeter, power_meter
from smkern.bench.providers import (
    describe,
    dispatched_call,
    dispatcher_of,
    precompile,
    problem_of,
)
from smkern.bench.results import Results, open_results
from smkern.device import device_info
from smkern.errors import SmkernError
from smkern.measure.gemm import GemmOperands, Shape
from smkern.measure.partitions import Partitions, trim_memory
from smkern.measure.provenance import collect_meta
from smkern.measure.timing import Case, Timing, calls_for, time_interleaved
from smkern.ops.gemm.dispatch import Dispatcher

OP = "gemm_cliffs"
SHAPES: tuple[Shape, ...] = ((6144, 4096), (4096, 14336))
MS = (64, 512, 1000, 2048)
FIRST_BUDGET = 16
ROUNDS = 7


@dataclass(slots=True)
class Cliffs:
    """Times one case at all budgets in the same rounds."""

    partitions: Partitions
    dispatcher: Dispatcher
    meter: PowerMeter
    backend: str | None = None

    def times(
        self, ops: GemmOperands, m: int, budgets: Sequence[int], errors: dict[str, str]
    ) -> dict[int, Timing]:
        """Budget to timing; what cannot run is named in `errors` by its budget."""
        call = dispatched_call(ops, m, backend=self.backend)
        problem = problem_of(ops.n, ops.k, m)
        cases: dict[str, Case] = {}
        for index, num_sms in enumerate(budgets):
            place = self.partitions.at(num_sms)
            if place is None:
                errors[str(num_sms)] = f"no partition of {num_sms} SMs"
                continue
            message = complaint(call, place.stream, ops, m)
            if message is not None:
                errors[str(num_sms)] = message
                continue
            ceiling = ceiling_of(self.dispatcher.profile, place.budget, place.placement)
            calls = calls_for(ceiling.expected_us(problem))
            cases[str(num_sms)] = Case(call, place.stream, calls, index)
        timings = time_interleaved(cases, rounds=ROUNDS, while_busy=self.meter, errors=errors)
        return {int(name): timing for name, timing in timings.items()}

    def cell(
        self, ops: GemmOperands, m: int, num_sms: int, timing: Timing | None, error: str
    ) -> dict:
        place = self.partitions.at(num_sms)
        problem = problem_of(ops.n, ops.k, m)
        cell: dict[str, Any] = {
            "op": OP,
            "case": Group(ops.n, ops.k, m, num_sms).case,
            "num_sms": num_sms,
            "mode": "green" if place is None else place.mode,
            "placement": "spread" if place is None else place.placement,
            "group_sms": num_sms,
            "provider": "smkern" if self.backend is None else "smkern:triton",
        }
        if timing is None or place is None:
            return cell | failed_cell(error)
        selection = self.dispatcher.select(problem, place.budget, self.backend)
        ceiling = ceiling_of(self.dispatcher.profile, place.budget, place.placement)
        cell |= measured_cell(problem, timing, ceiling)
        clock, watts = self.meter.last
        about = {"config": describe(selection.config), "source": selection.source}
        return cell | {"sm_mhz": clock, "watts": watts, **about}


def measure_case(
    cliffs: Cliffs, ops: GemmOperands, m: int, budgets: Sequence[int], results: Results
) -> None:
    """All budgets once; those that break a rule, and their rivals, a second time."""
    errors: dict[str, str] = {}
    timings = cliffs.times(ops, m, budgets, errors)
    us = {num_sms: timing.us_median for num_sms, timing in timings.items()}
    suspects = sorted(to_measure_again(us))
    again = cliffs.times(ops, m, suspects, errors) if suspects else {}
    for num_sms in budgets:
        error = errors.get(str(num_sms), "not measured")
        cell = cliffs.cell(ops, m, num_sms, timings.get(num_sms), error)
        if num_sms in again and cell["us"]:
            cell["us_again"] = round(again[num_sms].us_median, 3)
        results.add(cell)


def summarize(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A verdict a case, by the second measurement where there is one; and how many are met."""
    cases: dict[str, dict[int, tuple[float, float]]] = {}
    for cell in cells:
        if cell["op"] != OP or not cell["us"]:
            continue
        case = cell["case"]
        us = cell.get("us_again", cell["us"])
        fraction = cell["fraction_of_ceiling"] * cell["us"] / us
        name = f"{cell['provider']} {case['m']}x{case['n']}x{case['k']}"
        cases.setdefault(name, {})[cell["num_sms"]] = (us, fraction)
    verdicts = {
        name: judge({n: v[0] for n, v in points.items()}, {n: v[1] for n, v in points.items()})
        for name, points in cases.items()
    }
    return {
        "cases": verdicts,
        "met": sum(v["met"] for v in verdicts.values()),
        "met_of_ceiling": sum(v["met_of_ceiling"] for v in verdicts.values()),
        "of": len(verdicts),
    }


def even_budgets(total: int, granularity: int = 2) -> tuple[int, ...]:
    """Every budget a ladder can realise, from 16 to the whole device."""
    step = granularity
    return (*range(FIRST_BUDGET, total, step), total)


@click.command("cliffs")
@common_options("cliffs")
@click.option("--own", is_flag=True, help="Our own kernels only, never cuBLASLt.")
def command(
    out: Path, resume: bool, quick: bool, shapes: Any, ms: Any, budgets: Any, own: bool
) -> None:
    """Time smkern.gemm at every even budget: more SMs must never be slower."""
    try:
        info = device_info()
        budgets = budgets or even_budgets(info.num_sms, info.sm_granularity)
        shapes = shapes or (SHAPES[:1] if quick else SHAPES)
        ms = ms or (MS[1:2] if quick else MS)
        results = open_results(out, resume=resume, meta=collect_meta())
        with Partitions(budgets, placements=("spread",)) as partitions:
            backend = "own" if own else None
            cliffs = Cliffs(partitions, dispatcher_of(), power_meter(), backend)
            _precompile(cliffs, shapes, ms, budgets)
            for n, k in shapes:
                ops = GemmOperands(n, k, max(ms))
                for m in ms:
                    measure_case(cliffs, ops, m, budgets, results)
                    results.summary = summarize(results.cells)
                    results.save(out)
                    trim_memory()
    except SmkernError as error:
        raise click.ClickException(str(error)) from error
    for name, verdict in results.summary["cases"].items():
        click.echo(f"{name}: {verdict}")
    click.echo(f"{results.summary['met']} of {results.summary['of']} cases without a cliff: {out}")


def _precompile(
    cliffs: Cliffs, shapes: Sequence[Shape], ms: Sequence[int], budgets: Sequence[int]
) -> None:
    places = [place for num_sms in budgets if (place := cliffs.partitions.at(num_sms)) is not None]
    wanted = (
        (problem_of(n, k, m), place.budget, cliffs.backend)
        for n, k in shapes
        for m in ms
        for place in places
    )
    precompile(cliffs.dispatcher, wanted)


if __name__ == "__main__":
    command()
