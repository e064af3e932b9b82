"""Pictures of whole models: a step's time, a prefill's rate, the runtime and its ablation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes

from smkern.bench.model.cases import limit_of
from smkern.bench.model.rows import DECODE, PREFILL, is_plain, of
from smkern.bench.plots.operators import gpu_of
from smkern.bench.plots.styles import provider_curve
from smkern.bench.results import Results
from smkern.bench.rows import Cell, grouped
from smkern.bench.runtime.cases import ABLATION, AGGREGATED, ALONE, OURS, PACED, STEADY, STOCK
from smkern.bench.runtime.rows import of as rows_of
from smkern.bench.tables.runtime import VARIANTS
from smkern.panels import Mark, Panel, Picture, curve, level, look

LIMIT = look("limit", "#c8553d", linewidth=1.2, linestyle=":")
BESIDE = look("smkern, beside a prefill", "#6a994e", "^", linewidth=1.4)
APART = look("smkern, kernels do not overlap", "#8d6a9f", "x", linewidth=1.0)
GEMMS = look("its four GEMMs by themselves", "#444444", "s", linewidth=1.2, linestyle="--")
SERVED = {
    (STEADY, OURS): look("smkern, multiplexed", "#1b6ca8", "o"),
    (PACED, OURS): look("smkern, multiplexed, decode paced", "#6a994e", "*", linestyle=""),
    (AGGREGATED, OURS): look("smkern, chunked", "#58a4d6", "s"),
    (STEADY, STOCK): look("stock, multiplexed", "#c8553d", "^"),
    (AGGREGATED, STOCK): look("stock, chunked", "#e0a08f", "v"),
}
"""Row and provider to the line; in the order in which they are drawn."""
PERCENTILES = {50: "#58a4d6", 99: "#1b6ca8"}


def model(results: Results) -> Iterator[Picture]:
    """`model-decode`, a panel a batch, and `model-prefill`, a panel a model."""
    measured = [cell for cell in results.cells if cell.get("us")]
    if steps := grouped(of(measured, DECODE), _step):
        panels = [Panel(title, _step_marks(cells), "ms") for title, cells in steps.items()]
        heading = f"Decode step by SM budget, ms ({gpu_of(results)})"
        yield Picture("model-decode", heading, panels)
    if prompts := grouped((c for c in of(measured, PREFILL) if is_plain(c)), _prompt):
        panels = [Panel(title, _prompt_marks(cells)) for title, cells in prompts.items()]
        heading = f"Prefill by SM budget, TFLOP/s ({gpu_of(results)})"
        yield Picture("model-prefill", heading, panels)


def _step(cell: Cell) -> str:
    case = cell["case"]
    return f"{case['model']}, {case['batch']} x {case['context']}"


def _prompt(cell: Cell) -> str:
    case = cell["case"]
    return f"{case['model']}, {case['batch']} x {case['tokens']}"


def _step_marks(cells: Sequence[Cell]) -> list[Mark]:
    alone = [cell for cell in cells if is_plain(cell)]
    apart = [c for c in cells if not c["case"]["beside"] and not c["case"]["overlap"]]
    beside = [c for c in cells if c["case"]["beside"] and c["case"]["overlap"]]
    floors = {cell["num_sms"]: cell["floor_us"] / 1e3 for cell in alone}
    return [
        provider_curve("ideal", floors, label="floor"),
        provider_curve("smkern", _limits(alone), **LIMIT),
        provider_curve("smkern", _ms(alone), label="smkern, alone"),
        provider_curve("smkern", _ms(apart), **APART),
        provider_curve("smkern", _ms(beside), **BESIDE),
    ]


def _ms(cells: Sequence[Cell]) -> dict[int, float]:
    return {cell["num_sms"]: cell["us"] / 1e3 for cell in cells}


def _limits(cells: Sequence[Cell]) -> dict[int, float]:
    found = {}
    for cell in cells:
        limit = limit_of(cell["num_sms"], cell["case"]["batch"])
        if limit is not None:
            found[cell["num_sms"]] = limit * cell["floor_us"] / 1e3
    return found


def _prompt_marks(cells: Sequence[Cell]) -> list[Mark]:
    gemms = {c["num_sms"]: c["gemm_tflops"] for c in cells if c.get("gemm_tflops")}
    whole = {cell["num_sms"]: cell["tflops"] for cell in cells}
    return [
        provider_curve("smkern", gemms, **GEMMS),
        provider_curve("smkern", whole, label="smkern, prefill"),
    ]


def runtime(results: Results) -> Iterator[Picture]:
    """`runtime-steady`, a panel a model, and `runtime-ablation`."""
    cells, gpu = results.cells, gpu_of(results)
    models = list(dict.fromkeys(cell["case"]["model"] for cell in rows_of(cells, STEADY)))
    if models:
        over = "time between tokens, p50, ms"
        panels = [Panel(name, _steady_marks(cells, name), "tokens/ms", over) for name in models]
        heading = f"Prefill tokens/ms beside 64 x 2048 decode ({gpu})"
        size = max(9.6, 4.8 * len(models)), 4.6  # the legend is wide
        yield Picture("runtime-steady", heading, panels, size=size)
    if rows_of(cells, f"{ABLATION}_tbt_p50_ms"):
        bars = [_bars(cells, at, n, color) for at, (n, color) in enumerate(PERCENTILES.items())]
        panel = Panel("p50 and p99", bars, "ms", "")
        heading = f"Time between tokens, ms ({gpu})"
        yield Picture("runtime-ablation", heading, [panel], size=(8.8, 4.2))


def _steady_marks(cells: Sequence[Cell], name: str) -> list[Mark]:
    marks = []
    for (row, provider), style in SERVED.items():
        found = [c for c in rows_of(cells, row, model=name) if c["provider"] == provider]
        points = [(c["tbt_p50_ms"], c["value"]) for c in found if c["value"]]
        marks.append(curve(points, markersize=4, linewidth=1.4, **style))
    for cell in rows_of(cells, ALONE, model=name):
        if cell["provider"] == OURS:
            label = "smkern, prompts alone on the whole device"
            marks.append(level(cell["value"], label=label))
    return marks


def _bars(cells: Sequence[Cell], at: int, percentile: int, color: str) -> Mark:
    """A bar a variant, the `at`-th beside the other percentiles'."""
    rows = rows_of(cells, f"{ABLATION}_tbt_p{percentile}_ms")
    found = {cell["case"]["variant"]: cell["value"] for cell in rows}
    names = [name for name in VARIANTS if name in found]
    shown = [VARIANTS[name].replace(", ", ",\n").replace(" each", "\neach") for name in names]

    def draw(panel: Axes) -> None:
        places = [index + 0.4 * at for index in range(len(names))]
        values = [found[name] for name in names]
        bars = panel.bar(places, values, width=0.38, color=color, label=f"p{percentile}")
        panel.bar_label(bars, fmt="%.1f", fontsize=8)
        panel.set_xticks([index + 0.2 for index in range(len(names))], shown, fontsize=7)

    return draw
