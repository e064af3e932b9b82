"""The README's blocks about the append, from the cells of `append.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.append.group import OPS, settled
from smkern.bench.markdown import NOT_MEASURED, markdown_table

Cell = dict[str, Any]


def append_table(cells: Iterable[Cell]) -> str:
    """smkern's microseconds and speed over the best peer: rows of cases, columns of budgets."""
    ours = [c for c in cells if c["op"] in OPS and c["provider"] == "smkern" and c.get("us")]
    if not ours:
        return NOT_MEASURED
    budgets = sorted({cell["group_sms"] for cell in ours})
    found: dict[str, dict[int, str]] = {}
    for cell in ours:
        lead = f" ({settled(cell):.2f})" if cell.get("vs_best") else ""
        found.setdefault(cell["case"]["name"], {})[cell["group_sms"]] = f"{cell['us']:.1f}{lead}"
    rows = [[name, *(row.get(budget, "") for budget in budgets)] for name, row in found.items()]
    return markdown_table(["us (x best peer) \\ SMs", *map(str, budgets)], rows)
