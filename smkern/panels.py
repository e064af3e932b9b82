"""How a picture is drawn: panels of marks, one legend, and a file that is the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Mark = Callable[[Axes], Any]
"""Draws one thing into a panel."""


def look(label: str, color: str, marker: str = "", **style: Any) -> dict[str, Any]:
    """How a line looks, and what the legend calls it."""
    return {"label": label, "color": color, "marker": marker, **style}


@dataclass(frozen=True, slots=True)
class Panel:
    """A title, what is drawn in order, and what the axes show."""

    title: str
    marks: Sequence[Mark]
    unit: str = "TFLOP/s"
    over: str = "SMs"


@dataclass(frozen=True, slots=True)
class Picture:
    """The panels of `name`.png.

    Args:
        size: of the figure, inches; by the panels where it is None.
        legend: one for the whole figure, else one in each panel.
    """

    name: str
    heading: str
    panels: Sequence[Panel]
    columns: int = 3
    size: tuple[float, float] | None = None
    legend: bool = True


def curve(points: Mapping[Any, float] | Iterable[tuple[float, float]], **style: Any) -> Mark:
    """A line through x to y; nothing where there are no points."""
    pairs = sorted(points.items() if isinstance(points, Mapping) else points)

    def draw(panel: Axes) -> None:
        if pairs:
            panel.plot([x for x, _ in pairs], [y for _, y in pairs], **style)

    return draw


def level(y: float, **style: Any) -> Mark:
    """A dashed line across the panel."""
    options = {"color": "#444444", "linewidth": 1.0, "linestyle": "--", **style}
    return lambda panel: panel.axhline(y, **options)


def write(picture: Picture, folder: Path) -> Path:
    """Draw the picture, from 0 up, into `folder`; no date goes into the file."""
    panels = picture.panels
    columns = min(picture.columns, max(1, len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.3 * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(picture.heading, fontsize=12)
    if picture.size is not None:
        figure.set_size_inches(*picture.size)
    labels: dict[str, Any] = {}
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw(panel, axes, legend=not picture.legend)
        handles, names = axes.get_legend_handles_labels()
        labels.update(zip(names, handles, strict=True))
    if picture.legend:
        figure.legend(
            list(labels.values()), list(labels), loc="outside lower center", ncols=3, fontsize=9
        )
    path = folder / f"{picture.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def _draw(panel: Panel, axes: Axes, *, legend: bool) -> None:
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.over, fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    for mark in panel.marks:
        mark(axes)
    if legend:
        axes.legend(fontsize=7)
    axes.set_ylim(bottom=0)  # now that all lines are there: it fixes the top too
