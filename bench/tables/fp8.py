"""The table of `fp8.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.fp8_rows import times_of
from smkern.bench.tables.markdown import pivot
from smkern.measure.timing import geomean

Cell = dict[str, Any]


def times_table(cells: Iterable[Cell]) -> str:
    """Times bf16's speed and torch's, geomeans over the shapes, by scales and rows over SMs."""
    cells = list(cells)
    groups: dict[tuple[str, int, int], list[Cell]] = {}
    for cell in cells:
        if cell["provider"] == "smkern" and cell.get("us"):
            case = cell["case"]
            groups.setdefault((case["scales"], case["m"], cell["num_sms"]), []).append(cell)
    entries = []
    for (scales, m, num_sms), ours in groups.items():
        means = (geomean(times_of(cells, ours, peer)) for peer in ("bf16", "torch"))
        text = " / ".join("-" if x is None else f"{x:.2f}" for x in means)
        entries.append((f"{scales}, {m}", num_sms, text))
    return pivot("scales of, rows", entries)
