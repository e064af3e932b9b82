"""The README's blocks about the runtime, from the cells of `runtime.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from smkern.bench.markdown import NOT_MEASURED, markdown_table
from smkern.bench.runtime.cases import (
    ABLATION,
    AGGREGATED,
    AIMS,
    ALONE,
    GAIN,
    HANDOVER,
    HOST,
    MEMORY,
    MISMATCHES,
    MIXED_IDLE,
    OURS,
    OVERHEAD,
    PLANS,
    QUEUES,
    SERVED_RATE,
    SOAK_LEAKS,
    SOAK_MINUTES,
    STEADY,
    STOCK,
    SWITCH,
    gap_name,
)
from smkern.bench.runtime.rows import KEPT_BY, LEAST, MOST, best, gain_meets, is_gain, of, sides

Cell = dict[str, Any]

VARIANTS = {
    "all": "layer by layer, polled, two steps launched",
    "layerwise_off": "all layers at once",
    "polling_off": "the host waits for each launch of prefill",
    "layerwise_and_polling_off": "both",
    "lookahead_off": "a step at a time",
    "all_off": "none of the three",
}
COSTS = {
    gap_name(1): "decode stream without a kernel, a step at a time, p50",
    gap_name(2): "the same, two steps launched",
    OVERHEAD: "prefill layer by layer over one launch, minus 1",
    MIXED_IDLE: "device idle inside a mixed forward",
    HOST: "host time of a step, 128 requests decode, p50, us",
    SWITCH: "host time of a switch, p50, us",
    f"{HANDOVER}_p50": "hand-over of SMs, p50, us",
    f"{HANDOVER}_p99": "hand-over of SMs, p99, us",
    MEMORY: "graphs and partitions, 20 batches x 7 splits, MiB",
    MISMATCHES: "tokens that differ from each request alone",
    SOAK_MINUTES: "soak, minutes",
    SOAK_LEAKS: "leaks, stalls and failures in it",
}


def gains_table(cells: Iterable[Cell]) -> str:
    """Prefill tokens per ms beside decode, chunked and multiplexed, by model and TBT limit."""
    cells = list(cells)
    found = {
        (c["case"]["model"], _limit_ms(c), c["provider"]): c
        for c in cells
        if is_gain(c) and c.get("value")
    }
    chunked = [c for c in of(cells, AGGREGATED) if c["provider"] == OURS]
    limits = {(c["case"]["model"], float(c["case"]["limit_ms"])) for c in chunked}
    if not limits:
        return NOT_MEASURED
    rows = []
    for model, limit_ms in sorted(limits, key=lambda of_: (_place(of_[0]), of_[1])):
        gain, stock = (
            found.get((model, limit_ms, by)) or _sides(cells, model, limit_ms, by)
            for by in (OURS, STOCK)
        )
        aim = AIMS.get((model, limit_ms))
        mark = "**" if aim and not ("value" in gain and gain_meets(gain | {"aim": aim})) else ""
        rows.append(
            [
                f"{model}, {limit_ms:g} ms",
                _side(gain, "aggregated_tokens_per_ms", "chunk"),
                _side(gain, "mux_tokens_per_ms", "rung", ", paced" if gain.get("paced") else ""),
                f"{mark}{_gained(gain)}{mark}{_star(gain)}",
                _ratio(gain.get("value_p50")),
                _ratio(aim),
                _ratio(gain.get("bound")),
                _pair(stock),
                f"{_gained(stock)}{_star(stock)}" if stock else "",
            ]
        )
    head = ["TBT limit", "chunked (tokens a step)", "multiplexed (decode SMs)", "ratio",
            "by p50", "aim", "decode free", "stock: chunked, multiplexed", "ratio"]  # fmt: skip
    return markdown_table(head, rows)


def _gained(gain: Cell) -> str:
    return _ratio(gain.get("value")) or "none"


def _star(gain: Cell) -> str:
    return "*" if gain.get("kept_by") == "p50" else ""


def _sides(cells: Sequence[Cell], model: str, limit_ms: float, provider: str) -> Cell:
    """Of a limit that not both sides keep, the side that does; {} where neither does."""
    steady, chunks = sides(cells, model, provider)
    gain: Cell = {}
    for name, side in (("aggregated", chunks), ("mux", steady)):
        strict, loose = (best(side, key, limit_ms) for key in KEPT_BY)
        kept = strict or loose
        if kept is not None:
            gain["kept_by"] = "p99" if strict else "p50"
            gain[f"{name}_tokens_per_ms"] = kept["value"]
            gain |= {k: v for k, v in {**kept["case"], **kept}.items() if k in ("chunk", "rung")}
    return gain


def _side(gain: Cell, value: str, about: str, more: str = "") -> str:
    if value not in gain:
        return "none keeps it"
    return f"{gain[value]:.1f} ({gain[about]:.0f}{more})"


def _limit_ms(cell: Cell) -> float:
    return float(cell["case"]["name"].removeprefix(GAIN).removesuffix("ms"))


def _place(model: str) -> int:
    """Of a model among the plans."""
    names = [plan.model for plan in PLANS]
    return names.index(model) if model in names else len(names)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _pair(cell: Cell) -> str:
    if not cell:
        return ""
    names = ("aggregated_tokens_per_ms", "mux_tokens_per_ms")
    return ", ".join(f"{cell[name]:.1f}" if name in cell else "none" for name in names)


def served_table(cells: Iterable[Cell]) -> str:
    """The steady state through the `Multiplexer`: TBT as delivered, the prompts' tokens per ms."""
    rows = []
    for cell in of(cells, SERVED_RATE):
        case, is_split = cell["case"], cell["case"]["policy"] == "fixed_split"
        how = f"`FixedSplit({cell['rung']})`" if is_split else f"`Aggregated({cell['chunk']:.0f})`"
        rows.append(
            [
                f"{case['model']}, {case['limit'].removesuffix('ms')} ms",
                how,
                f"{cell['tbt_p50_ms']:.2f}",
                f"{cell['tbt_p99_ms']:.2f}",
                _keeps(cell, float(case["limit"].removesuffix("ms"))),
                f"{cell['value']:.1f}",
            ]
        )
    head = ["chosen for", "policy", "TBT p50, ms", "p99", "keeps it", "prompts, tokens/ms"]
    return markdown_table(head, rows) if rows else NOT_MEASURED


def _keeps(cell: Cell, limit_ms: float) -> str:
    kept = (name for name in KEPT_BY if cell[name] <= limit_ms)
    return {"tbt_p99_ms": "p99", "tbt_p50_ms": "p50"}.get(next(kept, ""), "**no**")


def steady_table(cells: Iterable[Cell]) -> str:
    """A decode step alone and beside prompts, and the prompts' tokens per ms, by decode SMs."""
    cells = list(cells)
    steady = of(cells, STEADY)
    if not steady:
        return NOT_MEASURED
    parts = []
    kinds = {(c["case"]["model"], c["provider"]) for c in steady}
    for model, provider in sorted(kinds, key=lambda kind: (kind[1] != OURS, _place(kind[0]))):
        members = {
            c["case"]["rung"]: c
            for c in steady
            if (c["case"]["model"], c["provider"]) == (model, provider)
        }
        rungs = sorted(members)
        rows = [
            ["step alone, ms", *(f"{members[n]['alone_ms']:.2f}" for n in rungs)],
            ["beside, p50", *(f"{members[n]['tbt_p50_ms']:.2f}" for n in rungs)],
            ["beside, p99", *(f"{members[n]['tbt_p99_ms']:.2f}" for n in rungs)],
            ["prompts, tokens/ms", *(f"{members[n]['value']:.1f}" for n in rungs)],
        ]
        free = of(cells, ALONE, model=model)
        alone = [c["value"] for c in free if c["provider"] == provider]
        said = f"; alone on the whole device {alone[0]:.1f} tokens/ms" if alone else ""
        table = markdown_table(["decode SMs", *map(str, rungs)], rows)
        parts.append(f"{model}, {_by(provider)}{said}:\n\n{table}")
    return "\n\n".join(parts)


def _by(provider: str) -> str:
    return "stock kernels" if provider == STOCK else provider


def costs_table(cells: Iterable[Cell]) -> str:
    """What the runtime costs: value and limit of each of its rows."""
    cells = list(cells)
    rows = []
    for name, label in COSTS.items():
        found = [cell for cell in of(cells, name) if cell["provider"] == OURS]
        found.sort(key=lambda cell: _place(cell["case"]["model"]))
        rows += [_cost(cell, name, label) for cell in found]
    queues = of(cells, QUEUES)
    if queues:
        shared = sum(cell["value"] for cell in queues)
        rows.append(["rungs whose lanes share a hardware queue", f"{shared} of {len(queues)}", ""])
    return markdown_table(["what", "value", "limit"], rows) if rows else NOT_MEASURED


def _cost(cell: Cell, name: str, label: str) -> list[str]:
    more = {k: v for k, v in cell["case"].items() if k not in ("model", "name")}
    said = ", beside decode" if more.pop("beside", False) else ""
    said += "".join(f", {v} {k}" for k, v in more.items())
    limit = MOST.get(name, LEAST.get(name))
    value = f"{cell['value']:g}" + (f" (p99 {cell['p99']:g})" if "p99" in cell else "")
    return [f"{cell['case']['model']}: {label}{said}", value, _limit(limit)]


def _limit(limit: float | None) -> str:
    return "" if limit is None else f"{limit:g}"


def ablation_table(cells: Iterable[Cell]) -> str:
    """TBT and prompts' tokens per ms with everything, and with parts turned off."""
    cells = list(cells)
    by = {n: _by_variant(of(cells, f"{ABLATION}_tbt_p{n}_ms")) for n in (50, 99)}
    rows = [
        [
            label,
            f"{by[50][name]['value']:.2f}",
            f"{by[99][name]['value']:.2f}",
            f"{by[50][name]['tokens_per_ms']:.1f}",
        ]
        for name, label in VARIANTS.items()
        if name in by[50] and name in by[99]
    ]
    head = ["launching", "TBT p50, ms", "p99", "prompts, tokens/ms"]
    return markdown_table(head, rows) if rows else NOT_MEASURED


def _by_variant(cells: Sequence[Cell]) -> dict[str, Cell]:
    return {cell["case"]["variant"]: cell for cell in cells}
