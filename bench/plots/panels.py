"""What the pictures share: a grid of panels, colours, and a file that is the same each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "smkern": {"color": "#1b6ca8", "marker": "o", "linewidth": 2.0, "zorder": 4},
    "smkern:triton": {"color": "#58a4d6", "marker": ".", "linewidth": 1.2, "zorder": 3},
    "cublas": {"color": "#c8553d", "marker": "s", "linewidth": 1.6, "zorder": 3},
    "flashinfer:fa2": {"color": "#6a994e", "marker": "^", "linewidth": 1.4, "zorder": 3},
    "flashinfer:fa3": {"color": "#c8553d", "marker": "s", "linewidth": 1.4, "zorder": 3},
    "flashinfer:cuda-cores": {"color": "#a7c080", "marker": "v", "linewidth": 1.0},
    "sdpa:cudnn": {"color": "#8d6a9f", "marker": "D", "linewidth": 1.0, "linestyle": "--"},
    "wrong-budget": {"color": "#999999", "marker": "x", "linewidth": 1.0, "linestyle": ":"},
    "ideal": {"color": "#444444", "linewidth": 1.0, "linestyle": "--", "zorder": 1},
}
LABELS = {
    "smkern": "smkern",
    "smkern:triton": "smkern, own kernels only",
    "flashinfer:fa2": "FlashInfer FA2, better of two partitions",
    "flashinfer:fa3": "FlashInfer FA3, better of two partitions",
    "flashinfer:cuda-cores": "FlashInfer, CUDA cores",
    "sdpa:cudnn": "cuDNN through SDPA, no pages",
    "cublas": "cuBLAS, better of two partitions",
    "wrong-budget": "our kernel told the whole device's budget",
    "ideal": "ideal: the partition's measured ceiling",
}


def grid(titles: Sequence[str], *, heading: str, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure with one panel a title; the axes are TFLOP/s over SMs."""
    columns = min(columns, max(1, len(titles)))
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.3 * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading, fontsize=12)
    panels = []
    for index, title in enumerate(titles):
        panel = figure.add_subplot(rows, columns, index + 1)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("SMs", fontsize=9)
        panel.set_ylabel("TFLOP/s", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
        panels.append(panel)
    return figure, panels


def line(
    panel: Axes, name: str, points: dict[int, float], *, label: str | None = None, **style: Any
) -> None:
    """One provider's line over budgets, called `label` if given; nothing where it has no points."""
    if points:
        budgets = sorted(points)
        values = [points[n] for n in budgets]
        options = {"markersize": 4, **STYLES[name], **style}
        panel.plot(budgets, values, label=label or LABELS[name], **options)


def save(figure: Figure, panels: Sequence[Axes], path: Path, *, legend: bool = True) -> Path:
    """Write the figure, from 0 up, with one legend for all panels; no date goes into the file."""
    labels: dict[str, Any] = {}
    for panel in panels:
        panel.set_ylim(bottom=0)  # now that all lines are there: it fixes the top too
        handles, names = panel.get_legend_handles_labels()
        labels.update(zip(names, handles, strict=True))
    if legend:
        figure.legend(
            list(labels.values()), list(labels), loc="outside lower center", ncols=3, fontsize=9
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path
