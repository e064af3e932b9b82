"""A decode step's time and a prefill's rate over SM budget, with floor and limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smkern.bench.model.cases import limit_of
from smkern.bench.model.rows import DECODE, PREFILL, is_plain, of
from smkern.bench.plots.panels import grid, line, save
from smkern.bench.results import Results

Cell = dict[str, Any]

LIMIT = {"color": "#c8553d", "marker": "", "linewidth": 1.2, "linestyle": ":"}
BESIDE = {"color": "#6a994e", "marker": "^", "linewidth": 1.4}
PLAIN = {"color": "#8d6a9f", "marker": "x", "linewidth": 1.0}
GEMM = {"color": "#444444", "marker": "s", "linewidth": 1.2, "linestyle": "--"}


def draw(results: Results, folder: Path) -> list[Path]:
    """`model-decode.png`, a panel a batch, and `model-prefill.png`, a panel a model."""
    gpu = results.meta.get("gpu") or "no GPU named"
    measured = [cell for cell in results.cells if cell.get("us")]
    pictures = []
    if steps := of(measured, DECODE):
        pictures.append(_decode(steps, folder / "model-decode.png", gpu))
    if passes := [c for c in of(measured, PREFILL) if is_plain(c)]:
        pictures.append(_prefill(passes, folder / "model-prefill.png", gpu))
    return pictures


def _decode(cells: Sequence[Cell], path: Path, gpu: str) -> Path:
    names = list(dict.fromkeys(_title(cell) for cell in cells))
    figure, panels = grid(names, heading=f"Decode step by SM budget, ms ({gpu})")
    for panel, name in zip(panels, names, strict=True):
        panel.set_ylabel("ms", fontsize=9)
        members = [cell for cell in cells if _title(cell) == name]
        alone = [cell for cell in members if is_plain(cell)]
        line(panel, "ideal", {c["num_sms"]: c["floor_us"] / 1e3 for c in alone}, label="floor")
        line(panel, "smkern", _limits(alone), label="limit", **LIMIT)
        line(panel, "smkern", _ms(alone), label="smkern, alone")
        others = [c for c in members if not c["case"]["beside"] and not c["case"]["overlap"]]
        line(panel, "smkern", _ms(others), label="smkern, kernels do not overlap", **PLAIN)
        beside = [c for c in members if c["case"]["beside"] and c["case"]["overlap"]]
        line(panel, "smkern", _ms(beside), label="smkern, beside a prefill", **BESIDE)
    return save(figure, panels, path)


def _title(cell: Cell) -> str:
    case = cell["case"]
    return f"{case['model']}, {case['batch']} x {case['context']}"


def _ms(cells: Sequence[Cell]) -> dict[int, float]:
    return {cell["num_sms"]: cell["us"] / 1e3 for cell in cells}


def _limits(cells: Sequence[Cell]) -> dict[int, float]:
    found = {}
    for cell in cells:
        limit = limit_of(cell["num_sms"], cell["case"]["batch"])
        if limit is not None:
            found[cell["num_sms"]] = limit * cell["floor_us"] / 1e3
    return found


def _prefill(cells: Sequence[Cell], path: Path, gpu: str) -> Path:
    names = list(dict.fromkeys(_prompt(cell) for cell in cells))
    figure, panels = grid(names, heading=f"Prefill by SM budget, TFLOP/s ({gpu})")
    for panel, name in zip(panels, names, strict=True):
        members = [cell for cell in cells if _prompt(cell) == name]
        rates = {c["num_sms"]: c["gemm_tflops"] for c in members if c.get("gemm_tflops")}
        line(panel, "smkern", rates, label="its four GEMMs by themselves", **GEMM)
        line(panel, "smkern", {c["num_sms"]: c["tflops"] for c in members}, label="smkern, prefill")
    return save(figure, panels, path)


def _prompt(cell: Cell) -> str:
    return f"{cell['case']['model']}, 1 x {cell['case']['tokens']}"
