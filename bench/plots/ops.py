"""Speed of a layer's other operators over the best peer, by SM budget: a line an operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smkern.bench.ops.rows import OPS
from smkern.bench.plots.panels import grid, save
from smkern.bench.results import Results
from smkern.bench.rows import settled

Cell = dict[str, Any]


def draw(results: Results, folder: Path) -> list[Path]:
    """`ops.png`; a panel an operator, a line a size."""
    cells = [
        c
        for c in results.cells
        if c["op"] in OPS and c["provider"] == "smkern" and c.get("vs_best")
    ]
    ops = [op for op in OPS if any(cell["op"] == op for cell in cells)]
    if not ops:
        return []
    gpu = results.meta.get("gpu") or "no GPU named"
    figure, panels = grid(ops, heading=f"Times as fast as the best peer, by SM budget ({gpu})")
    for panel, op in zip(panels, ops, strict=True):
        panel.set_ylabel("x best peer", fontsize=9)
        panel.axhline(1.0, color="#444444", linewidth=1.0, linestyle="--")
        members = [cell for cell in cells if cell["op"] == op]
        for name in dict.fromkeys(cell["case"]["name"] for cell in members):
            points = {c["group_sms"]: settled(c) for c in members if c["case"]["name"] == name}
            budgets = sorted(points)
            label = name.removeprefix(f"{op}-")
            panel.plot(budgets, [points[n] for n in budgets], marker="o", markersize=3, label=label)
        panel.legend(fontsize=7)
    return [save(figure, panels, folder / "ops.png", legend=False)]
