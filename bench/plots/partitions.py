"""Read bandwidth over SMs by who chose them: smkern, the driver, torch, FlashInfer's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from smkern.bench.partition_rows import OURS, Points, bandwidth, candidates
from smkern.bench.plots.panels import grid, save
from smkern.bench.results import Results

STYLES: dict[str, dict[str, Any]] = {
    "flashinfer-way": {"color": "#6a994e", "marker": "^", "markersize": 8, "linewidth": 1.0},
    "torch": {"color": "#c8553d", "marker": "s", "markersize": 5, "linewidth": 1.2},
    "driver": {"color": "#8d6a9f", "marker": ".", "linewidth": 1.4, "linestyle": "--"},
    OURS: {"color": "#1b6ca8", "marker": "o", "linewidth": 2.2, "zorder": 4},
}
LABELS = {
    OURS: "smkern: spread",
    "driver": "the driver's own groups of 8",
    "torch": "torch's green contexts",
    "flashinfer-way": "FlashInfer's way",
}


def draw(results: Results, folder: Path) -> list[Path]:
    """`partitions.png`: TB/s over SMs, and the range of the orders that were tried."""
    if not bandwidth(results.cells, OURS):
        return []
    heading = f"Read bandwidth of a partition ({results.meta.get('gpu') or 'no GPU named'})"
    figure, (panel,) = grid(["the same number of SMs, chosen differently"], heading=heading)
    figure.set_size_inches(8.4, 5.0)
    panel.set_ylabel("TB/s", fontsize=9)
    _range(panel, list(candidates(results.cells).values()))
    for name, style in STYLES.items():
        points = bandwidth(results.cells, name)
        if points:
            panel.plot(list(points), list(points.values()), label=LABELS[name], **style)
    panel.set_ylim(bottom=0)
    panel.set_xlim(left=0)
    return [save(figure, [panel], folder / "partitions.png")]


def _range(panel: Axes, orders: list[Points]) -> None:
    """A band from the slowest to the fastest candidate order at each count."""
    counts = sorted({n for points in orders for n in points})
    if not counts:
        return
    at = [[points[n] for points in orders if n in points] for n in counts]
    low, high = [min(values) for values in at], [max(values) for values in at]
    panel.fill_between(
        counts, low, high, color="#999999", alpha=0.25, linewidth=0, label="other orders tried"
    )
