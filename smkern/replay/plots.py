"""Pictures of replays, all policies in one: over the rate, over the limit, over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smkern.panels import Mark, Panel, Picture, curve, level, look, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smkern.replay.records import Served

COLORS = (
    "#1b6ca8", "#c8553d", "#6a994e", "#e0a030", "#8d6a9f", "#58a4d6", "#444444", "#b5739d",
    "#2a9d8f", "#a7c080", "#d98880", "#7f6000",
)  # fmt: skip
MARKERS = "os^vD*xP<>hp"
POINTS = 400
"""Points of a line that shows a whole distribution."""
MOMENTS = 1000
"""Of a replay, at which its split is shown."""

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Policy to its (x, y)."""


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each policy."""
    return {
        name: look(
            name, COLORS[at % len(COLORS)], MARKERS[at % len(MARKERS)], markersize=4, linewidth=1.4
        )
        for at, name in enumerate(names)
    }


def draw_comparison(heading: str, served: Mapping[str, Served], tbt_ms: float, path: Path) -> Path:
    """First tokens and gaps as distributions, a line a policy; the split over time, a row each."""
    styles = looks(list(served))
    smooth = {name: {**style, "marker": ""} for name, style in styles.items()}
    ttft: list[Mark] = [_logarithmic]
    tbt: list[Mark] = [_logarithmic, level(0.99, linewidth=0.8), _upright(tbt_ms)]
    for name, one in served.items():
        waits = [1e3 * record.ttft_s for record in one.counted if len(record.token_s)]
        ttft.append(curve(_shares(waits, len(one.counted)), **smooth[name]))
        gaps = 1e3 * one.gaps_s()
        tbt.append(curve(_shares(gaps, len(gaps)), **smooth[name]))
    panels = [
        Panel("first tokens that came by then", ttft, "share", "TTFT, ms"),
        Panel("gaps between tokens no longer", tbt, "share", "TBT, ms"),
    ]
    if any(one.split for one in served.values()):
        panels.append(Panel("the split over time", [strips(served)], "", "s"))
    size = (5.2 * len(panels), 5.0)
    return _written(Picture(path.stem, heading, panels, len(panels), size), path)


def rates_picture(
    name: str, title: str, attainment: Points, latency: Mapping[str, Points]
) -> Picture:
    """Attainment and latencies over the rate.

    Args:
        name: Of the picture's file.
        title: Above it.
        attainment: Share of gaps and first tokens that keep their limits, by policy and rate.
        latency: A panel's title and its points, ms.
    """
    styles = _styles([attainment, *latency.values()])
    panels = [_panel("within the limits", attainment, styles, "share", "requests/s", 0.99)]
    panels += [
        _panel(panel, points, styles, "ms", "requests/s") for panel, points in latency.items()
    ]
    return Picture(name, title, panels)


def limits_picture(name: str, title: str, goodputs: Mapping[str, Points]) -> Picture:
    """Goodput over the limit of TBT, a panel a trace."""
    over, styles = "TBT limit, ms", _styles(goodputs.values())
    panels = [
        _panel(panel, points, styles, "requests/s", over) for panel, points in goodputs.items()
    ]
    return Picture(name, title, panels)


def draw_splits(served: Sequence[Served], path: Path) -> Path:
    """SMs of decode and requests over time, a panel a replay (Bullet Figure 20, MuxWise Figure
    18)."""
    panels = []
    for one in served:
        style = look(one.policy, COLORS[0], linewidth=1.0)
        tokens = _prompt_rate(one)
        prompts = curve(tokens, **look("prompt tokens/ms", COLORS[3], linewidth=1.0))
        panels.append(Panel(one.policy, [_steps(one, style), prompts], "SMs of decode", "s"))
    return _written(Picture(path.stem, "the split over time", panels, legend=False), path)


def _styles(panels: Iterable[Points]) -> dict[str, dict[str, Any]]:
    """A policy looks the same in all panels, for they share a legend."""
    return looks(list(dict.fromkeys(name for points in panels for name in points)))


def _panel(
    title: str,
    points: Points,
    styles: Mapping[str, Mapping[str, Any]],
    unit: str,
    over: str,
    limit: float | None = None,
) -> Panel:
    marks: list[Mark] = [curve(pairs, **styles[name]) for name, pairs in points.items()]
    if limit is not None:
        marks.append(level(limit))
    return Panel(title, marks, unit, over)


def _written(picture: Picture, path: Path) -> Path:
    found = write(picture, path.parent)
    return found if found == path else found.replace(path)


def _shares(values: Sequence[float] | Any, count: int) -> list[tuple[float, float]]:
    """(value, share of all that are no larger) at some values."""
    if not len(values):
        return []
    ordered = np.sort(np.asarray(values))
    at = np.unique(np.linspace(0, len(ordered) - 1, min(POINTS, len(ordered))).astype(int))
    return [(float(ordered[n]), (n + 1) / count) for n in at]


def _logarithmic(panel: Axes) -> None:
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")


def _upright(x: float) -> Mark:
    return lambda panel: panel.axvline(x, color="#444444", linewidth=0.8, linestyle=":")


def strips(served: Mapping[str, Served]) -> Mark:
    """A row a policy, coloured by the SMs of decode at `MOMENTS` moments; white: no split."""
    names = list(served)[::-1]  # from below
    edges = np.linspace(0.0, max(one.end_s for one in served.values()), MOMENTS + 1)
    sms = np.full((len(names), MOMENTS), np.nan)
    for row, one in zip(sms, (served[name] for name in names), strict=True):
        starts = [at_s for at_s, _ in one.split]
        rungs = np.array([np.nan, *(rung or np.nan for _, rung in one.split)])
        row[:] = rungs[np.searchsorted(starts, edges[:-1], "right")]
        row[edges[:-1] >= one.end_s] = np.nan

    def draw(panel: Axes) -> None:
        mesh = panel.pcolormesh(edges, np.arange(len(names) + 1), sms, cmap="viridis_r", vmin=0)
        panel.hlines(range(1, len(names)), 0, edges[-1], color="white", linewidth=4)
        panel.set_yticks([row + 0.5 for row in range(len(names))], names)
        panel.figure.colorbar(mesh, ax=panel, label="SMs of decode")

    return draw


def _steps(served: Served, style: Mapping[str, Any]) -> Mark:
    """SMs of decode from change to change; 0: no split."""
    changes = [(at_s, rung or 0) for at_s, rung in served.split]

    def draw(panel: Axes) -> None:
        if changes:
            times = [at_s for at_s, _ in changes] + [served.end_s]
            values = [sms for _, sms in changes]
            panel.step(times, [*values, values[-1]], where="post", **style)

    return draw


def _prompt_rate(served: Served) -> list[tuple[float, float]]:
    """Prompt tokens a millisecond whose first token came, over stretches of two seconds."""
    width = 2.0
    sums: dict[int, int] = {}
    for record in served.records:
        if len(record.token_s):
            at = int(record.token_s[0] / width)
            sums[at] = sums.get(at, 0) + record.new_tokens
    return [(width * (at + 0.5), total / width / 1e3) for at, total in sorted(sums.items())]
