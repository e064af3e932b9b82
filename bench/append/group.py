"""One append case in one budget: every provider checked once, then timed in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from smkern.bench.append.cases import AppendGroup
from smkern.bench.append.operands import AppendOperands, Layout
from smkern.bench.append.providers import AppendPeers, our_contender
from smkern.bench.attention.group import best_of_layouts, cell_head, compared, note_again
from smkern.bench.attention.providers import Contender
from smkern.bench.cells import ceiling_of, failed_cell, measured_cell
from smkern.bench.power import PowerMeter
from smkern.bench.stage import Stage
from smkern.bench.summary import geomean
from smkern.bench.timing import (
    Call,
    Case,
    Timing,
    calls_for,
    rounds_for,
    time_interleaved,
    try_eagerly,
)
from smkern.device import Profile

Cell = dict[str, Any]
OPS = ("qk_norm_rope_append", "append_kv")
TOLERANCE = {"bf16": 1e-2, "fp8": 5e-2}
"""|x - reference| / |reference|: bf16 rounds to 2e-3, e4m3 to 3e-2."""


@dataclass(slots=True)
class AppendRunner:
    """Measures groups on a stage.

    Args:
        stage: the partitions.
        profile: the device's ceilings.
        meter: reads clock and power while the device is busy.
        budget_us: device time that the rounds of one group may take.
    """

    stage: Stage
    profile: Profile
    meter: PowerMeter
    budget_us: float = 100_000.0

    def measure(
        self, group: AppendGroup, ops: AppendOperands, peers: AppendPeers, *, again: bool = True
    ) -> list[Cell]:
        """The cells of a group; a provider that cannot run has an `error`.

        A group that loses to a peer is measured a second time; both results stand.
        """
        place = self.stage.at(group.num_sms)
        if place is None:
            return []
        places = dict.fromkeys((place, self.stage.at(group.num_sms, "default")))
        contenders = [our_contender(ops, place)]
        contenders += [c for at in places if at is not None for c in peers.at(at)]
        cells = self._round(group, ops, contenders)
        if again and any(is_losing(cell) for cell in cells):
            cells = note_again(cells, self._round(group, ops, contenders))
        return cells

    def _round(
        self, group: AppendGroup, ops: AppendOperands, contenders: Sequence[Contender]
    ) -> list[Cell]:
        errors: dict[str, str] = {}
        cases: dict[str, Case] = {}
        for index, contender in enumerate(contenders):
            call = checked(contender, ops, errors)
            if call is not None:
                cases[contender.name] = Case(call, contender.place.stream, 1, index)
        timings = self._time(cases, errors)
        cells = {
            c.name: self._cell(group, c, timings.get(c.name), errors.get(c.name))
            for c in contenders
        }
        best = best_of_layouts(cells)
        kept = {name: timings[name] for name in best if name in timings}
        for name, cell in best.items():
            if cell["provider"] == "smkern" and name in timings:
                best[name] = cell | compared(timings[name], best, kept)
        return list(best.values())

    def _time(self, cases: dict[str, Case], errors: dict[str, str]) -> dict[str, Timing]:
        if not cases:
            return {}
        once = time_interleaved(cases, rounds=1, errors=errors)
        cases = {
            name: replace(case, calls=calls_for(once[name].us_median))
            for name, case in cases.items()
            if name in once
        }
        replay_us = sum(once[name].us_median * case.calls for name, case in cases.items())
        rounds = rounds_for(replay_us, budget_us=self.budget_us)
        return time_interleaved(cases, rounds=rounds, while_busy=self.meter, errors=errors)

    def _cell(
        self, group: AppendGroup, contender: Contender, timing: Timing | None, error: str | None
    ) -> Cell:
        place, case = contender.place, group.case
        cell = cell_head(case.op, case.about, place, contender.provider) | dict(contender.about)
        cell["group_sms"] = group.num_sms
        if timing is None:
            return cell | failed_cell(error or "not measured")
        ceiling = ceiling_of(self.profile, place.budget, place.placement)
        clock, watts = self.meter.last
        cell |= measured_cell(case, timing, ceiling) | {"sm_mhz": clock, "watts": watts}
        return cell | dict(contender.tell())


def checked(contender: Contender, ops: AppendOperands, errors: dict[str, str]) -> Call | None:
    """The contender's call after one eager run with the right result, else None and its error."""
    ops.wanted()
    ops.poison()
    torch.cuda.synchronize()
    layout: Layout = contender.about["layout"]
    tolerance = TOLERANCE[ops.case.cache_dtype]
    try:
        call = contender.make()
        message = try_eagerly(call, contender.place.stream)
    except Exception as error:  # noqa: BLE001  whatever a peer raises is its result
        message = f"{type(error).__name__}: {error}".splitlines()[0]
    if message is None:
        relative = ops.error(layout)
        if relative < tolerance:
            return call
        message = f"wrong result: |x - torch| / |torch| is {relative:.3g}, at most {tolerance}"
    errors[contender.name] = message
    return None


def is_losing(cell: Cell) -> bool:
    """Whether our cell is slower than the best peer."""
    return cell["provider"] == "smkern" and (cell.get("vs_best") or 1.0) < 1.0


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Rows over our cells: worst and mean lead over the best peer, share of the bandwidth."""
    ours = [c for c in cells if c["op"] in OPS and c["provider"] == "smkern"]
    measured = [c for c in ours if c.get("us")]
    if not ours:
        return {}
    beside = [c for c in measured if c.get("vs_best")]
    leads = [settled(c) for c in beside]
    long = [c for c in measured if c["case"]["tokens"] >= 8192]
    shares = [c["fraction_of_ceiling"] for c in long]
    return {
        "append_geomean_vs_best": _row(geomean(leads), None, len(leads)),
        "append_worst_vs_best": _row(min(leads, default=None), 1.0, len(leads)),
        "append_8192_worst_fraction": _row(min(shares, default=None), None, len(shares)),
        "append_not_measured": [
            {"name": c["case"]["name"], "num_sms": c["num_sms"], "error": c["error"]}
            for c in ours
            if c.get("error")
        ],
    }


def settled(cell: Cell) -> float:
    """The ratio to the best peer that counts: of the second measurement where there is one."""
    return float(cell.get("vs_best_again") or cell["vs_best"])


def _row(value: float | None, target: float | None, cells: int) -> dict[str, Any]:
    met = None if value is None or target is None else value >= target
    rounded = None if value is None else round(value, 4)
    return {"value": rounded, "target": target, "met": met, "cells": cells}
