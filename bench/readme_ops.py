"""The README's blocks about a layer's other operators, from the cells of `ops.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.markdown import NOT_MEASURED, markdown_table
from smkern.bench.ops.rows import OPS, reads, settled

Cell = dict[str, Any]


def ops_table(cells: Iterable[Cell]) -> str:
    """smkern's microseconds and speed over the best peer: rows of cases, columns of budgets.

    Where a peer is faster in the measurement that counts, the ratio is bold.
    """
    ours = [c for c in cells if c["op"] in OPS and c["provider"] == "smkern" and c.get("us")]
    if not ours:
        return NOT_MEASURED
    budgets = sorted({cell["group_sms"] for cell in ours})
    found: dict[str, dict[int, str]] = {}
    for cell in ours:
        found.setdefault(_label(cell), {})[cell["group_sms"]] = f"{cell['us']:.1f}{_lead(cell)}"
    rows = [[name, *(row.get(budget, "") for budget in budgets)] for name, row in found.items()]
    return markdown_table(["us (x best peer) \\ SMs", *map(str, budgets)], rows)


def _label(cell: Cell) -> str:
    op, name = cell["op"], cell["case"]["name"]
    return f"{op} {name.removeprefix(f'{op}-')}"


def _lead(cell: Cell) -> str:
    if not cell.get("vs_best"):
        return ""
    ratio = settled(cell)
    return f" ({ratio:.2f})" if ratio >= 1.0 else f" (**{ratio:.2f}**)"


def sample_table(cells: Iterable[Cell]) -> str:
    """What `sample` takes, as reads of the logits at the partition's bandwidth."""
    ours = [
        c
        for c in cells
        if c["op"] == "sample" and c["provider"] == "smkern" and c.get("fraction_of_bandwidth")
    ]
    if not ours:
        return NOT_MEASURED
    budgets = sorted({cell["group_sms"] for cell in ours})
    by = {(c["case"]["batch"], c["group_sms"]): f"{reads(c):.1f}" for c in ours}
    batches = sorted({batch for batch, _ in by})
    rows = [[f"{batch} rows", *(by.get((batch, n), "") for n in budgets)] for batch in batches]
    return markdown_table(["reads of the logits \\ SMs", *map(str, budgets)], rows)
