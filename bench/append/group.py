"""One append case in one budget: every provider checked once, then timed in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smkern.bench.append.cases import AppendGroup
from smkern.bench.append.providers import AppendPeers, our_contender
from smkern.bench.contest import Contender, Contest, cell_head, checked_call, note_again
from smkern.measure.append import TOLERANCE, AppendOperands, Layout
from smkern.measure.timing import Call, Timing, geomean

Cell = dict[str, Any]
OPS = ("qk_norm_rope_append", "append_kv")


@dataclass(slots=True)
class AppendRunner(Contest):
    """Measures groups in partitions."""

    budget_us: float = 100_000.0

    def measure(
        self, group: AppendGroup, ops: AppendOperands, peers: AppendPeers, *, again: bool = True
    ) -> list[Cell]:
        """The cells of a group; a provider that cannot run has an `error`.

        A group that loses to a peer is measured a second time; both results stand.
        """
        place = self.partitions.at(group.num_sms)
        if place is None:
            return []
        places = dict.fromkeys((place, self.partitions.at(group.num_sms, "default")))
        contenders = [our_contender(ops, place)]
        contenders += [c for at in places if at is not None for c in peers.at(at)]
        cells = self._round(group, ops, contenders)
        if again and any(is_losing(cell) for cell in cells):
            cells = note_again(cells, self._round(group, ops, contenders))
        return cells

    def _round(
        self, group: AppendGroup, ops: AppendOperands, contenders: Sequence[Contender]
    ) -> list[Cell]:
        case = group.case

        def cell(contender: Contender, timing: Timing | None, error: str | None) -> Cell:
            head = cell_head(case.op, case.about, contender.place, contender.provider)
            head |= {**contender.about, "group_sms": group.num_sms}
            return head | self.figures(case, contender, timing, error)

        return self.round(contenders, lambda c, errors: checked(c, ops, errors), cell)


def checked(contender: Contender, ops: AppendOperands, errors: dict[str, str]) -> Call | None:
    """The contender's call after one eager run with the right result, else None and its error."""
    ops.wanted()
    ops.poison()
    layout: Layout = contender.about["layout"]
    tolerance = TOLERANCE[ops.case.cache_dtype]

    def complaint(_: Any) -> str | None:
        relative = ops.error(layout)
        if relative < tolerance:
            return None
        return f"wrong result: |x - torch| / |torch| is {relative:.3g}, at most {tolerance}"

    return checked_call(contender, errors, complaint)


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
