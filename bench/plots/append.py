"""What an append moves, TB/s over SM budget: smkern, FlashInfer, torch, and the ideal line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smkern.bench.append.cases import OPS
from smkern.bench.plots.attention import best, ideal
from smkern.bench.plots.panels import grid, line, save
from smkern.bench.results import Results

DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "torch:compile": ("torch.compile", {"color": "#8d6a9f", "marker": "D", "linewidth": 1.0}),
    "flashinfer": ("FlashInfer's kernels in turn", {"color": "#6a994e", "marker": "^"}),
    "smkern": ("smkern", {}),
}
LEAST_TOKENS = 512
"""Fewer are a matter of microseconds, not of rates."""


def draw(results: Results, folder: Path) -> list[Path]:
    """`append.png`; a panel a case."""
    cells = [
        c
        for c in results.cells
        if c["op"] in OPS and c.get("us") and c["case"]["tokens"] >= LEAST_TOKENS
    ]
    names = list(dict.fromkeys(cell["case"]["name"] for cell in cells))
    if not names:
        return []
    gpu = results.meta.get("gpu") or "no GPU named"
    figure, panels = grid(names, heading=f"Append by SM budget, TB/s ({gpu})")
    for panel, name in zip(panels, names, strict=True):
        panel.set_ylabel("TB/s", fontsize=9)
        members = [cell for cell in cells if cell["case"]["name"] == name]
        line(panel, "ideal", ideal(members, "tbps"))
        for provider, (label, style) in DRAWN.items():
            line(panel, "smkern", best(members, provider, "tbps"), label=label, **style)
    return [save(figure, panels, folder / "append.png")]
