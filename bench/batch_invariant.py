"""`python -m smkern.bench.batch_invariant`: what `batch_invariant=True` costs, and its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

import smkern
from smkern.bench.cases import Group, common_options, gemm_groups
from smkern.bench.cells import ceiling_of, failed_cell, measured_cell
from smkern.bench.check import complaint
from smkern.bench.gemm import by_shape
from smkern.bench.power import PowerMeter, power_meter
from smkern.bench.providers import describe, dispatched_call, dispatcher_of, problem_of
from smkern.bench.results import Results, open_results
from smkern.device import device_info
from smkern.errors import SmkernError
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Partitions, trim_memory
from smkern.measure.provenance import collect_meta
from smkern.measure.timing import Case, calls_for, geomean, ratio, time_interleaved
from smkern.ops.gemm.dispatch import Dispatcher

OP = "gemm_batch_invariant"
SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))
MS = (1, 8, 32, 64, 128, 256, 1024, 4096)
BUDGETS = (16, 32, 60, 100, 132)
CHECKED_MS = (1, 2, 8, 17, 64, 77, 129, 256)
ROUNDS = 7


def measure(
    group: Group,
    ops: GemmOperands,
    partitions: Partitions,
    dispatcher: Dispatcher,
    meter: PowerMeter,
) -> list[dict[str, Any]]:
    """Two cells: as dispatched, and batch-invariant with its time over the other's."""
    place = partitions.at(group.num_sms)
    if place is None:
        return []
    ceiling = ceiling_of(dispatcher.profile, place.budget, place.placement)
    cases, errors, about = {}, {}, {}
    for index, (provider, invariant) in enumerate((("smkern", False), ("batch-invariant", True))):
        problem = problem_of(group.n, group.k, group.m, batch_invariant=invariant)
        about[provider] = describe(dispatcher.select(problem, place.budget).config)
        call = dispatched_call(ops, group.m, batch_invariant=invariant)
        message = complaint(call, place.stream, ops, group.m)
        if message is not None:
            errors[provider] = message
            continue
        calls = calls_for(ceiling.expected_us(problem))
        cases[provider] = Case(call, place.stream, calls, index)
    timings = time_interleaved(cases, rounds=ROUNDS, while_busy=meter, errors=errors)
    cells = []
    for provider, config in about.items():
        cell: dict[str, Any] = {
            "op": OP,
            "case": group.case,
            "num_sms": place.num_sms,
            "mode": place.mode,
            "placement": place.placement,
            "group_sms": group.num_sms,
            "provider": provider,
            "config": config,
        }
        if provider in timings:
            problem = problem_of(group.n, group.k, group.m)
            cell |= measured_cell(problem, timings[provider], ceiling)
            cell |= dict(zip(("sm_mhz", "watts"), meter.last, strict=True))
        else:
            cell |= failed_cell(errors.get(provider, "not measured"))
        if len(timings) == 2 and provider == "batch-invariant":
            cell["over_dispatched"] = round(ratio(timings[provider], timings["smkern"]), 4)
        cells.append(cell)
    return cells


def differing(
    ops: GemmOperands, partitions: Partitions, budgets: tuple[int, ...]
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


def summarize(results: Results, differences: dict[str, list[dict[str, int]]]) -> dict[str, Any]:
    costs = [c["over_dispatched"] for c in results.cells if c.get("over_dispatched")]
    return {
        "geomean_over_dispatched": geomean(costs),
        "worst_over_dispatched": max(costs, default=None),
        "cells": len(costs),
        "rows_that_differ": differences,
    }


@click.command("batch-invariant")
@common_options("batch_invariant")
def command(out: Path, resume: bool, quick: bool, shapes: Any, ms: Any, budgets: Any) -> None:
    """Time smkern.gemm with and without batch_invariant=True, and compare bits over M and SMs."""
    try:
        total = device_info().num_sms
        budgets = budgets or tuple(n for n in (BUDGETS[:2] if quick else BUDGETS) if n <= total)
        groups = gemm_groups(
            shapes or (SHAPES[:1] if quick else SHAPES), ms or (MS[:2] if quick else MS), budgets
        )
        results = open_results(out, resume=resume, meta=collect_meta())
        dispatcher, meter = dispatcher_of(), power_meter()
        differences = {}
        with Partitions(budgets, placements=("spread",)) as partitions:
            for ops, members in by_shape(groups):
                for group in members:
                    for cell in measure(group, ops, partitions, dispatcher, meter):
                        results.add(cell)
                checked = GemmOperands(ops.n, ops.k, max(CHECKED_MS), num_sets=1)
                differences[f"{ops.n}x{ops.k}"] = differing(checked, partitions, budgets)
                results.summary = summarize(results, differences)
                results.save(out)
                trim_memory()
    except SmkernError as error:
        raise click.ClickException(str(error)) from error
    click.echo(str(results.summary))


if __name__ == "__main__":
    command()
