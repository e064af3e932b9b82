"""Decode TB/s and prefill TFLOP/s over SM budget: smkern, FlashInfer, SDPA, and the ideal line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smkern.bench.plots.panels import grid, line, save
from smkern.bench.results import Results

Cell = dict[str, Any]
Points = dict[int, float]

PICTURES = {"decode": ("tbps", "TB/s"), "prefill": ("tflops", "TFLOP/s")}
"""Kind to what is drawn and its unit; a mixed step is drawn with the prefills."""
DRAWN = (
    "sdpa:cudnn",
    "flashinfer:cuda-cores",
    "flashinfer:fa2",
    "flashinfer:fa3",
    "smkern:triton",
    "smkern",
)
OWN_LABELS = {"smkern:triton": "smkern's Triton kernel"}


def draw(results: Results, folder: Path) -> list[Path]:
    """`attention-decode.png` and `attention-prefill.png`; a panel a case."""
    measured = [c for c in results.cells if c["op"] == "paged_attention" and c.get("us")]
    gpu = results.meta.get("gpu") or "no GPU named"
    pictures = []
    for kind, (rate, unit) in PICTURES.items():
        cells = [c for c in measured if (c["case"]["kind"] == "decode") == (kind == "decode")]
        names = list(dict.fromkeys(cell["case"]["name"] for cell in cells))
        if not names:
            continue
        heading = f"Paged attention by SM budget, {unit} ({gpu})"
        figure, panels = grid(names, heading=heading)
        for panel, name in zip(panels, names, strict=True):
            panel.set_ylabel(unit, fontsize=9)
            members = [cell for cell in cells if cell["case"]["name"] == name]
            line(panel, "ideal", ideal(members, rate))
            for provider in DRAWN:
                label = OWN_LABELS.get(provider)
                line(panel, provider, best(members, provider, rate), label=label)
        pictures.append(save(figure, panels, folder / f"attention-{kind}.png"))
    return pictures


def best(cells: Iterable[Cell], provider: str, rate: str) -> Points:
    """Budget to the rate; the better where a provider ran in two partitions of one size."""
    points: Points = {}
    for cell in cells:
        if cell["provider"] == provider:
            budget = cell["num_sms"]
            points[budget] = max(points.get(budget, 0.0), cell[rate])
    return points


def ideal(cells: Iterable[Cell], rate: str) -> Points:
    """Budget to the rate at the floor: bytes over bandwidth, or FLOPs over the dense rate."""
    return {
        cell["num_sms"]: cell[rate] / cell["fraction_of_ceiling"]
        for cell in cells
        if cell["provider"] == "smkern" and cell.get("fraction_of_ceiling")
    }
