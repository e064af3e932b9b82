"""`smkern bench batch-invariant`: what `batch_invariant=True` costs, and its bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch

import smkern
from smkern.bench.cases import Group, there
from smkern.bench.frame import GroupSuite, Provider
from smkern.bench.gemm import gemm_groups
from smkern.bench.gemm_providers import GemmCase, ShapeBench
from smkern.bench.rows import Cell, geomean
from smkern.bench.suite import GEMM_OPTIONS, Output, suite_command
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Partitions, Place
from smkern.measure.timing import Timing, ratio

Differences = dict[str, list[dict[str, int]]]

OP = "gemm_batch_invariant"
PROVIDERS = {"smkern": False, "batch-invariant": True}
SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))
MS = (1, 8, 32, 64, 128, 256, 1024, 4096)
BUDGETS = (16, 32, 60, 100, 132)
CHECKED_MS = (1, 2, 8, 17, 64, 77, 129, 256)


@dataclass(slots=True)
class InvariantBench(ShapeBench):
    """As dispatched, and batch-invariant with its time over the other's."""

    def ours(self, case: GemmCase, place: Place) -> list[Provider]:
        return [
            self.dispatched(name, case, place, batch_invariant=invariant)
            for name, invariant in PROVIDERS.items()
        ]

    def compare(
        self, provider: Provider, cells: Mapping[str, Cell], timings: Mapping[str, Timing]
    ) -> Cell:
        dispatched = [timings[key] for key in timings if cells[key]["provider"] == "smkern"]
        if provider.name == "smkern" or not dispatched:
            return {}
        return {"over_dispatched": round(ratio(timings[provider.key], dispatched[0]), 4)}


def differing(
    ops: GemmOperands, partitions: Partitions, budgets: Iterable[int]
) -> list[dict[str, int]]:
    """The (m, num_sms) whose rows differ in any bit from the same rows at M = 256 on 132 SMs."""
    most = max(CHECKED_MS)
    wanted = smkern.gemm(ops.a(most, 0), ops.w(0), batch_invariant=True)
    torch.cuda.synchronize()
    found = []
    for num_sms in budgets:
        place = partitions.at(num_sms)
        for m in CHECKED_MS if place is not None else ():
            ops.poison(m)
            torch.cuda.synchronize()
            with torch.cuda.stream(place.stream):  # type: ignore[union-attr]
                smkern.gemm(ops.a(m, 0), ops.w(0), out=ops.out(m, 0), batch_invariant=True)
            torch.cuda.synchronize()
            if not torch.equal(ops.out(m, 0), wanted[:m]):
                found.append({"m": m, "num_sms": num_sms})
    return found


def summarize(cells: Iterable[Cell], differences: Differences) -> dict[str, Any]:
    costs = [c["over_dispatched"] for c in cells if c.get("over_dispatched")]
    return {
        "geomean_over_dispatched": geomean(costs),
        "worst_over_dispatched": max(costs, default=None),
        "cells": len(costs),
        "rows_that_differ": differences,
    }


def invariant_suite(differences: Differences) -> GroupSuite[GemmCase]:
    """The cases; `differences` gets the rows of each shape that differ."""

    def check(groups: Sequence[Group[GemmCase]], partitions: Partitions, _: Any) -> None:
        budgets = dict.fromkeys(group.num_sms for group in groups)
        for n, k in dict.fromkeys(group.case.shape for group in groups):
            operands = GemmOperands(n, k, max(CHECKED_MS), num_sets=1)
            differences[f"{n}x{k}"] = differing(operands, partitions, budgets)

    return GroupSuite(
        InvariantBench.of,
        lambda cells: summarize(cells, differences),
        shares=lambda case: case.shape,
        prepare=check,
        placements=("spread",),
    )


@suite_command("batch-invariant", *GEMM_OPTIONS)
def command(output: Output, *, shapes: Any, ms: Any, budgets: Any) -> None:
    """Time smkern.gemm with and without batch_invariant=True, and compare bits over M and SMs."""
    quick = output.quick
    groups = gemm_groups(
        shapes or (SHAPES[:1] if quick else SHAPES),
        ms or (MS[:2] if quick else MS),
        budgets or there(BUDGETS[:2] if quick else BUDGETS),
        op=OP,
    )
    results = output.open()
    differences: Differences = dict(results.summary.get("rows_that_differ", {}))
    invariant_suite(differences).run(groups, results, output, again=False)
    click.echo(str(results.summary))
