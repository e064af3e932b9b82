"""`smkern bench cliffs`: every even budget; more SMs are never slower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.cases import Group
from smkern.bench.cells import cell_head, failed_cell
from smkern.bench.cliff_rules import judge, to_measure_again
from smkern.bench.frame import GroupSuite, Provider
from smkern.bench.gemm_providers import GemmCase, ShapeBench
from smkern.bench.rows import Cell
from smkern.bench.suite import GEMM_OPTIONS, Output, suite_command
from smkern.device import device_info
from smkern.measure.compiling import precompile
from smkern.measure.gemm import Shape
from smkern.measure.partitions import Partitions

OP = "gemm_cliffs"
SHAPES: tuple[Shape, ...] = ((6144, 4096), (4096, 14336))
MS = (64, 512, 1000, 2048)
FIRST_BUDGET = 16
US_A_BUDGET = 2_000.0
"""Device time for each budget's rounds: seven of 250 us."""


@dataclass(slots=True, kw_only=True)
class CliffBench(ShapeBench):
    """A case at all budgets in the same rounds.

    Args:
        budgets: the SM counts.
        backend: None, as dispatched; "own", our kernels alone.
    """

    budgets: Sequence[int]
    backend: str | None = None

    @property
    def provider(self) -> str:
        return provider_of(self.backend)

    def providers(self, group: Group[GemmCase], partitions: Partitions) -> list[Provider]:
        found = []
        for num_sms in self.budgets:
            if (place := partitions.at(num_sms)) is not None:
                one = self.dispatched(self.provider, group.case, place, backend=self.backend)
                found.append(replace(one, about={**one.about, "group_sms": num_sms}))
        return found

    def compare(self, provider: Provider, cells: Any, timings: Any) -> Cell:
        return {}

    def to_repeat(
        self, providers: list[Provider], cells: list[Cell], is_losing: Callable[[Cell], bool]
    ) -> list[Provider]:
        """The budgets that break a rule, and those that they were held against."""
        suspects = to_measure_again({c["num_sms"]: c["us"] for c in cells if c["us"]})
        return [one for one in providers if one.place.num_sms in suspects]

    def more(self, group: Group[GemmCase], partitions: Partitions, cells: list[Cell]) -> list[Cell]:
        """Cells of the budgets that the device has no partition of."""
        head = cell_head(OP, group.case.about, partitions.full, self.provider)
        return [
            head
            | {"num_sms": n, "mode": "green", "placement": "spread", "group_sms": n}
            | failed_cell(f"no partition of {n} SMs")
            for n in self.budgets
            if partitions.at(n) is None
        ]


def provider_of(backend: str | None) -> str:
    return "smkern" if backend is None else "smkern:triton"


def cliff_suite(budgets: Sequence[int], backend: str | None) -> GroupSuite[GemmCase]:
    """The cases, each of which is one group of all budgets, named by the largest."""

    given: dict[str, Any] = {"budgets": budgets, "backend": backend}
    given["budget_us"] = US_A_BUDGET * len(budgets)

    def compile_all(
        groups: Sequence[Group[GemmCase]], partitions: Partitions, progress: Progress
    ) -> None:
        places = [place for n in budgets if (place := partitions.at(n)) is not None]
        cases = [group.case.problem for group in groups]
        precompile((problem, place.budget, backend) for problem in cases for place in places)

    return GroupSuite(
        partial(CliffBench.of, **given),
        summarize,
        shares=lambda case: case.shape,
        prepare=compile_all,
        placements=("spread",),
        counts=lambda cell: cell["provider"] == provider_of(backend),
    )


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
    return (*range(FIRST_BUDGET, total, granularity), total)


@suite_command(
    "cliffs",
    *GEMM_OPTIONS,
    click.option("--own", is_flag=True, help="Our own kernels only, never cuBLASLt."),
)
def command(output: Output, *, shapes: Any, ms: Any, budgets: Any, own: bool) -> None:
    """Time smkern.gemm at every even budget: more SMs must never be slower."""
    info = device_info()
    budgets = budgets or even_budgets(info.num_sms, info.sm_granularity)
    shapes = shapes or (SHAPES[:1] if output.quick else SHAPES)
    ms = ms or (MS[1:2] if output.quick else MS)
    groups = [Group(GemmCase(m, n, k, OP), max(budgets)) for n, k in shapes for m in ms]
    results = output.open()
    suite = cliff_suite(budgets, "own" if own else None)
    suite.run(groups, results, output, again=True, budgets=budgets)
    for name, verdict in results.summary["cases"].items():
        click.echo(f"{name}: {verdict}")
    met, of = results.summary["met"], results.summary["of"]
    click.echo(f"{met} of {of} cases without a cliff: {output.path}")
