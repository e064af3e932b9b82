"""Pictures of operators and partitions over SM budgets, with the peers' and the ideal line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes

from smkern.bench.ops.rows import OPS
from smkern.bench.partition_rows import OURS, bandwidth, candidates
from smkern.bench.plots.styles import provider_curve
from smkern.bench.results import Results
from smkern.bench.rows import Cell, grouped, settled
from smkern.panels import Mark, Panel, Picture, curve, level, look

Points = dict[int, float]

PICTURED_MS = (64, 512, 2048)
GEMM: Mapping[str, dict[str, Any]] = {"wrong-budget": {}, "cublas": {}, "smkern": {}}
"""Provider, in the order in which they are drawn, to what differs from its style."""
CLIFFS: Mapping[str, dict[str, Any]] = {"smkern:triton": {}, "smkern": {"marker": "."}}
ATTENTION: Mapping[str, dict[str, Any]] = {
    "sdpa:cudnn": {},
    "flashinfer:cuda-cores": {},
    "flashinfer:xqa": {},
    "flashinfer:fa2": {},
    "flashinfer:fa3": {},
    "smkern:triton": {"label": "smkern's Triton kernel"},
    "smkern": {},
}
RATES = {"decode": ("tbps", "TB/s"), "prefill": ("tflops", "TFLOP/s")}
"""Kind to what is drawn and its unit; a mixed step is drawn with the prefills."""
CHOICES = {
    "flashinfer-way": look("FlashInfer's way", "#6a994e", "^", markersize=8, linewidth=1.0),
    "torch": look("torch's green contexts", "#c8553d", "s", markersize=5, linewidth=1.2),
    "driver": look("the driver's own groups of 8", "#8d6a9f", ".", linewidth=1.4, linestyle="--"),
    OURS: look("smkern: spread", "#1b6ca8", "o", linewidth=2.2, zorder=4),
}
"""Who chose the SMs of a partition, in the order in which they are drawn."""


def gemm(results: Results) -> Iterator[Picture]:
    """`gemm-m<rows>` for each pictured row count that was measured; a panel a shape."""
    measured = _measured(results, "gemm")
    by_rows = grouped(measured, lambda cell: cell["case"]["m"])
    for m in [m for m in PICTURED_MS if m in by_rows] or sorted(by_rows)[-1:]:
        shapes = grouped(by_rows[m], lambda cell: (cell["case"]["n"], cell["case"]["k"]))
        panels = [Panel(f"w [{n}, {k}]", rates(x, GEMM)) for (n, k), x in shapes.items()]
        heading = f"GEMM, bf16, M = {m}, by SM budget ({gpu_of(results)})"
        yield Picture(f"gemm-m{m}", heading, panels)


def cliffs(results: Results) -> Iterator[Picture]:
    """smkern at every budget beside the ideal line, a panel a case: a cliff would be seen."""
    measured = _measured(results, "gemm_cliffs")
    cases = grouped(measured, lambda cell: tuple(cell["case"][size] for size in ("n", "k", "m")))
    panels = [Panel(f"w [{n}, {k}], M = {m}", rates(x, CLIFFS)) for (n, k, m), x in cases.items()]
    if panels:
        heading = f"smkern.gemm at every even SM budget ({gpu_of(results)})"
        yield Picture("cliffs", heading, panels, columns=4)


def attention(results: Results) -> Iterator[Picture]:
    """`attention-decode` and `attention-prefill`; a panel a case."""
    measured = _measured(results, "paged_attention")
    for kind, (rate, unit) in RATES.items():
        found = [c for c in measured if (c["case"]["kind"] == "decode") == (kind == "decode")]
        panels = [
            Panel(name, rates(x, ATTENTION, rate), unit)
            for name, x in grouped(found, _name).items()
        ]
        if panels:
            heading = f"Paged attention by SM budget, {unit} ({gpu_of(results)})"
            yield Picture(f"attention-{kind}", heading, panels)


def ops(results: Results) -> Iterator[Picture]:
    """Speed of a layer's other operators over the best peer; a panel an operator, a line a size."""
    compared = [c for c in results.cells if c["provider"] == "smkern" and c.get("vs_best")]
    by = grouped(compared, lambda cell: cell["op"])
    panels = []
    for op in (op for op in OPS if op in by):
        marks = [level(1.0)]
        for name, cells in grouped(by[op], _name).items():
            points = {cell["group_sms"]: settled(cell) for cell in cells}
            label = name.removeprefix(f"{op}-")
            marks.append(curve(points, marker="o", markersize=3, label=label))
        panels.append(Panel(op, marks, "x best peer"))
    if panels:
        heading = f"Times as fast as the best peer, by SM budget ({gpu_of(results)})"
        yield Picture("ops", heading, panels, legend=False)


def partitions(results: Results) -> Iterator[Picture]:
    """Read bandwidth by who chose the SMs, and the range of the orders that were tried."""
    if bandwidth(results.cells, OURS):
        marks = [_range(list(candidates(results.cells).values()))]
        marks += [curve(bandwidth(results.cells, name), **style) for name, style in CHOICES.items()]
        marks.append(lambda panel: panel.set_xlim(left=0))
        panel = Panel("the same number of SMs, chosen differently", marks, "TB/s")
        heading = f"Read bandwidth of a partition ({gpu_of(results)})"
        yield Picture("partitions", heading, [panel], size=(8.4, 5.0))


def _range(orders: list[Points]) -> Mark:
    """A band from the slowest to the fastest candidate order at each count."""
    at: dict[int, list[float]] = {}
    for points in orders:
        for n, tbps in points.items():
            at.setdefault(n, []).append(tbps)
    counts = sorted(at)
    low, high = [min(at[n]) for n in counts], [max(at[n]) for n in counts]
    style: dict[str, Any] = {"color": "#999999", "alpha": 0.25, "linewidth": 0}

    def draw(panel: Axes) -> None:
        if counts:
            panel.fill_between(counts, low, high, label="other orders tried", **style)

    return draw


def gpu_of(results: Results) -> str:
    return results.meta.get("gpu") or "no GPU named"


def _name(cell: Cell) -> str:
    return str(cell["case"]["name"])


def _measured(results: Results, *ops: str) -> list[Cell]:
    return [cell for cell in results.cells if cell["op"] in ops and cell.get("us")]


def rates(
    cells: Iterable[Cell], providers: Mapping[str, dict[str, Any]], rate: str = "tflops"
) -> list[Mark]:
    """The ideal line, and the providers'."""
    cells = list(cells)
    lines = [provider_curve("ideal", ideal(cells, rate))]
    for name, style in providers.items():
        lines.append(provider_curve(name, best(cells, name, rate), **style))
    return lines


def best(cells: Iterable[Cell], provider: str, rate: str = "tflops") -> Points:
    """Budget to the rate; the better where a provider ran in two partitions of one size."""
    points: Points = {}
    for cell in cells:
        if cell["provider"] == provider and cell.get(rate):
            points[cell["num_sms"]] = max(points.get(cell["num_sms"], 0.0), cell[rate])
    return points


def ideal(cells: Iterable[Cell], rate: str = "tflops") -> Points:
    """Budget to the rate at the floor: bytes over bandwidth, or FLOPs over the dense rate."""
    return {
        cell["num_sms"]: cell[rate] / cell["fraction_of_ceiling"]
        for cell in cells
        if cell["provider"] == "smkern" and cell.get("fraction_of_ceiling")
    }
