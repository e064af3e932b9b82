"""The table of `fp8.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.fp8_rows import times_of
from smkern.bench.peers import DEEPGEMM
from smkern.bench.rows import Cell, geomean, grouped
from smkern.bench.tables.markdown import pivot


def times_table(cells: Iterable[Cell]) -> str:
    """Times bf16's speed and peers', geomeans over the shapes, by scales and rows over SMs."""
    cells = list(cells)
    measured = [cell for cell in cells if cell["provider"] == "smkern" and cell.get("us")]
    groups = grouped(measured, lambda cell: (_row(cell["case"]), cell["num_sms"]))
    entries = []
    for (row, num_sms), ours in groups.items():
        means = (geomean(times_of(cells, ours, peer)) for peer in ("bf16", "torch", DEEPGEMM))
        text = " / ".join("-" if x is None else f"{x:.2f}" for x in means)
        entries.append((row, num_sms, text))
    return pivot("scales of, rows", entries)


def _row(case: dict[str, Any]) -> str:
    if "experts" in case:
        return f"{case['scales']}, experts of {case['tokens']} tokens"
    return f"{case['scales']}, {case['m']}"
