"""TFLOP/s at every even budget, a panel a case: a cliff would be seen."""

from __future__ import annotations

from pathlib import Path

from smkern.bench.plots.gemm import best, ideal
from smkern.bench.plots.panels import grid, line, save
from smkern.bench.results import Results


def draw(results: Results, folder: Path) -> list[Path]:
    """`cliffs.png`: smkern at every budget beside the ideal line."""
    cells = [c for c in results.cells if c["op"] == "gemm_cliffs" and c.get("us")]
    cases = list(dict.fromkeys(tuple(c["case"][s] for s in ("n", "k", "m")) for c in cells))
    if not cases:
        return []
    titles = [f"w [{n}, {k}], M = {m}" for n, k, m in cases]
    heading = f"smkern.gemm at every even SM budget ({results.meta.get('gpu') or 'no GPU named'})"
    figure, panels = grid(titles, heading=heading, columns=4)
    for panel, wanted in zip(panels, cases, strict=True):
        members = [c for c in cells if tuple(c["case"][s] for s in ("n", "k", "m")) == wanted]
        line(panel, "ideal", ideal(members))
        line(panel, "smkern:triton", best(members, "smkern:triton"))
        line(panel, "smkern", best(members, "smkern"), marker=".")
    return [save(figure, panels, folder / "cliffs.png")]
