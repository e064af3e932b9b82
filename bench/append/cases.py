"""The cases of the append suite, and the rows that its results must show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.rows import Cell, not_measured, settled, target_row
from smkern.measure.append import AppendCase, Kind
from smkern.measure.timing import geomean

OPS = ("qk_norm_rope_append", "append_kv")
KINDS: tuple[Kind, ...] = ("plain", "norm-rope", "fp8")
TOKENS = (8, 64, 512, 2048, 8192)
BUDGETS = (16, 32, 64, 84, 100, 116, 132)
QUICK_BUDGETS = (16, 132)
CASES = tuple(AppendCase(kind, tokens) for kind in KINDS for tokens in TOKENS)
QUICK_CASES = tuple(case for case in CASES if case.tokens in (64, 8192))


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Rows over our cells: worst and mean lead over the best peer, share of the bandwidth."""
    ours = [c for c in cells if c["op"] in OPS and c["provider"] == "smkern"]
    if not ours:
        return {}
    measured = [c for c in ours if c.get("us")]
    leads = [settled(c) for c in measured if c.get("vs_best")]
    shares = [c["fraction_of_ceiling"] for c in measured if c["case"]["tokens"] >= 8192]
    return {
        "append_geomean_vs_best": target_row(geomean(leads), None, len(leads)),
        "append_worst_vs_best": target_row(min(leads, default=None), 1.0, len(leads)),
        "append_8192_worst_fraction": target_row(min(shares, default=None), None, len(shares)),
        "append_not_measured": not_measured(ours, _name),
    }


def _name(cell: Cell) -> dict[str, Any]:
    return {"name": cell["case"]["name"], "num_sms": cell["num_sms"]}
