"""TFLOP/s over SM budget: smkern, cuBLAS, a wrong budget, and the ideal line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smkern.bench.plots.panels import grid, line, save
from smkern.bench.results import Results

Cell = dict[str, Any]
Points = dict[int, float]

PICTURED_MS = (64, 512, 2048)
DRAWN = ("wrong-budget", "cublas", "smkern")


def draw(results: Results, folder: Path) -> list[Path]:
    """`gemm-m<rows>.png` for each pictured row count that was measured; a panel a shape."""
    measured = [c for c in results.cells if c["op"] == "gemm" and c.get("us")]
    rows = sorted({cell["case"]["m"] for cell in measured})
    wanted = [m for m in PICTURED_MS if m in rows] or rows[-1:]
    return [_picture(measured, m, results.meta, folder) for m in wanted]


def _picture(cells: Iterable[Cell], m: int, meta: dict[str, Any], folder: Path) -> Path:
    of_row = [cell for cell in cells if cell["case"]["m"] == m]
    shapes = list(dict.fromkeys((c["case"]["n"], c["case"]["k"]) for c in of_row))
    heading = f"GEMM, bf16, M = {m}, by SM budget ({meta.get('gpu') or 'no GPU named'})"
    figure, panels = grid([f"w [{n}, {k}]" for n, k in shapes], heading=heading)
    for panel, shape in zip(panels, shapes, strict=True):
        members = [c for c in of_row if (c["case"]["n"], c["case"]["k"]) == shape]
        line(panel, "ideal", ideal(members))
        for name in DRAWN:
            line(panel, name, best(members, name))
    return save(figure, panels, folder / f"gemm-m{m}.png")


def best(cells: Iterable[Cell], provider: str) -> Points:
    """Budget to TFLOP/s; the better where a provider ran in two partitions of one size."""
    points: Points = {}
    for cell in cells:
        if cell["provider"] == provider and cell.get("tflops"):
            budget = cell["num_sms"]
            points[budget] = max(points.get(budget, 0.0), cell["tflops"])
    return points


def ideal(cells: Iterable[Cell]) -> Points:
    """Budget to the TFLOP/s at the floor: bytes over bandwidth, or FLOPs over the dense rate."""
    return {
        cell["num_sms"]: cell["tflops"] / cell["fraction_of_ceiling"]
        for cell in cells
        if cell["provider"] == "smkern" and cell.get("fraction_of_ceiling")
    }
