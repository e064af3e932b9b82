"""Prefill throughput under a TBT limit, multiplexed and chunked; and the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smkern.bench.plots.panels import grid, save
from smkern.bench.results import Results
from smkern.bench.runtime.cases import ABLATION, AGGREGATED, ALONE, OURS, PACED, STEADY, STOCK
from smkern.bench.runtime.rows import of
from smkern.bench.tables.runtime import VARIANTS

Cell = dict[str, Any]

LINES: dict[tuple[str, str], dict[str, Any]] = {
    (STEADY, OURS): {"label": "smkern, multiplexed", "color": "#1b6ca8", "marker": "o"},
    (PACED, OURS): {
        "label": "smkern, multiplexed, decode paced",
        "color": "#6a994e",
        "marker": "*",
        "linestyle": "",
    },
    (AGGREGATED, OURS): {"label": "smkern, chunked", "color": "#58a4d6", "marker": "s"},
    (STEADY, STOCK): {"label": "stock, multiplexed", "color": "#c8553d", "marker": "^"},
    (AGGREGATED, STOCK): {"label": "stock, chunked", "color": "#e0a08f", "marker": "v"},
}
PERCENTILES = {50: "#58a4d6", 99: "#1b6ca8"}


def draw(results: Results, folder: Path) -> list[Path]:
    """`runtime-steady.png`, a panel a model, and `runtime-ablation.png`."""
    gpu = results.meta.get("gpu") or "no GPU named"
    pictures = []
    if of(results.cells, STEADY):
        pictures.append(_steady(results.cells, folder / "runtime-steady.png", gpu))
    if of(results.cells, f"{ABLATION}_tbt_p50_ms"):
        pictures.append(_ablation(results.cells, folder / "runtime-ablation.png", gpu))
    return pictures


def _steady(cells: Sequence[Cell], path: Path, gpu: str) -> Path:
    models = list(dict.fromkeys(cell["case"]["model"] for cell in of(cells, STEADY)))
    figure, panels = grid(models, heading=f"Prefill tokens/ms beside 64 x 2048 decode ({gpu})")
    figure.set_size_inches(max(9.6, 4.8 * len(models)), 4.6)  # the legend is wide
    for panel, model in zip(panels, models, strict=True):
        panel.set_xlabel("time between tokens, p50, ms", fontsize=9)
        panel.set_ylabel("tokens/ms", fontsize=9)
        for (name, provider), style in LINES.items():
            found = [c for c in of(cells, name, model=model) if c["provider"] == provider]
            points = sorted((c["tbt_p50_ms"], c["value"]) for c in found if c["value"])
            if points:
                xs, ys = zip(*points, strict=True)
                panel.plot(xs, ys, markersize=4, linewidth=1.4, **style)
        for cell in of(cells, ALONE, model=model):
            if cell["provider"] == OURS:
                label = "smkern, prompts alone on the whole device"
                panel.axhline(
                    cell["value"], color="#444444", linewidth=1.0, linestyle="--", label=label
                )
    return save(figure, panels, path)


def _ablation(cells: Sequence[Cell], path: Path, gpu: str) -> Path:
    figure, panels = grid(["p50 and p99"], heading=f"Time between tokens, ms ({gpu})")
    figure.set_size_inches(8.8, 4.2)
    panel = panels[0]
    panel.set_xlabel("")
    panel.set_ylabel("ms", fontsize=9)
    for at, (n, color) in enumerate(PERCENTILES.items()):
        found = {c["case"]["variant"]: c["value"] for c in of(cells, f"{ABLATION}_tbt_p{n}_ms")}
        names = [name for name in VARIANTS if name in found]
        places = [index + 0.4 * at for index in range(len(names))]
        values = [found[name] for name in names]
        bars = panel.bar(places, values, width=0.38, color=color, label=f"p{n}")
        panel.bar_label(bars, fmt="%.1f", fontsize=8)
        shown = [VARIANTS[name].replace(", ", ",\n").replace(" each", "\neach") for name in names]
        panel.set_xticks([index + 0.2 for index in range(len(names))], shown, fontsize=7)
    return save(figure, panels, path)
