"""Tables of `runtime.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smkern.bench.rows import Cell
from smkern.bench.runtime import cases
from smkern.bench.runtime.rows import KEPT_BY, LEAST, MOST, best, gain_meets, is_gain, of, sides
from smkern.bench.tables.markdown import NOT_MEASURED, pivot, rows_or_none

VARIANTS = {
    "all": "layer by layer, polled, two steps launched",
    "layerwise_off": "all layers at once",
    "polling_off": "the host waits for each launch of prefill",
    "layerwise_and_polling_off": "both",
    "lookahead_off": "a step at a time",
    "all_off": "none of the three",
}
COSTS = {
    cases.gap_name(1): "decode stream without a kernel, a step at a time, p50",
    cases.gap_name(2): "the same, two steps launched",
    cases.OVERHEAD: "prefill layer by layer over one launch, minus 1",
    cases.HOST: "host time of a step, 128 requests decode, p50, us",
    cases.SWITCH: "host time of a switch, p50, us",
    f"{cases.HANDOVER}_p50": "hand-over of SMs, p50, us",
    f"{cases.HANDOVER}_p99": "hand-over of SMs, p99, us",
    cases.MEMORY: "graphs and partitions, 20 batches x 7 splits, MiB",
    cases.MISMATCHES: "tokens that differ from each request alone",
    cases.SOAK_MINUTES: "soak, minutes",
    cases.SOAK_LEAKS: "leaks, stalls and failures in it",
}
STEADY_FIGURES = (
    ("step alone, ms", "alone_ms", ".2f"),
    ("beside, p50", "tbt_p50_ms", ".2f"),
    ("beside, p99", "tbt_p99_ms", ".2f"),
    ("prompts, tokens/ms", "value", ".1f"),
)


def gains_by_limit(
    cells: Iterable[Cell], provider: str = cases.OURS
) -> dict[tuple[str, float], Cell]:
    """Gains by (model, TBT limit in ms), in the order of the plans.

    Where only one side keeps a limit: what is known of that side.
    """
    cells = list(cells)
    found = {
        (
            c["case"]["model"],
            float(c["case"]["name"].removeprefix(cases.GAIN).removesuffix("ms")),
        ): c
        for c in cells
        if is_gain(c) and c.get("value") and c["provider"] == provider
    }
    limits = {
        (cell["case"]["model"], float(cell["case"]["limit_ms"]))
        for cell in of(cells, cases.AGGREGATED)
        if cell["provider"] == cases.OURS
    }
    return {
        (model, limit): found.get((model, limit)) or _sides(cells, model, limit, provider)
        for model, limit in sorted(limits, key=lambda key: (_index(key[0]), key[1]))
    }


def gains_table(cells: Iterable[Cell]) -> str:
    """Prefill tokens per ms beside decode, chunked and multiplexed, by model and TBT limit."""
    cells = list(cells)
    stocks = gains_by_limit(cells, cases.STOCK)
    rows = []
    for (model, limit_ms), gain in gains_by_limit(cells).items():
        stock, aim = stocks[model, limit_ms], cases.AIMS.get((model, limit_ms))
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
    return rows_or_none(head, rows)


def _sides(cells: Sequence[Cell], model: str, limit_ms: float, provider: str) -> Cell:
    """The side that keeps a limit which not both keep; {} where neither does."""
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


def _gained(gain: Cell) -> str:
    return _ratio(gain.get("value")) or "none"


def _star(gain: Cell) -> str:
    return "*" if gain.get("kept_by") == "p50" else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _pair(cell: Cell) -> str:
    names = ("aggregated_tokens_per_ms", "mux_tokens_per_ms") if cell else ()
    return ", ".join(f"{cell[name]:.1f}" if name in cell else "none" for name in names)


def _index(model: str) -> int:
    """The model's place among the plans."""
    names = [plan.model for plan in cases.PLANS]
    return names.index(model) if model in names else len(names)


def served_table(cells: Iterable[Cell]) -> str:
    """The steady state through the `Multiplexer`: TBT as delivered, the prompts' tokens per ms."""
    rows = []
    found = of(cells, cases.SERVED_RATE)
    for cell in sorted(found, key=lambda cell: (cell["case"]["model"], _limit_ms(cell))):
        limit = _limit_ms(cell)
        kept = (name for name in KEPT_BY if cell[name] <= limit)
        keeps = {"tbt_p99_ms": "p99", "tbt_p50_ms": "p50"}.get(next(kept, ""), "**no**")
        names = ("tbt_p50_ms", "tbt_p99_ms", "tbt_max_ms")
        tbt = (f"{cell[name]:.2f}" for name in names)
        chip = (f"{cell[name]:.0f}" if cell.get(name) else "" for name in ("sm_mhz", "watts"))
        rows.append(
            [
                f"{cell['case']['model']}, {limit:g} ms", _policy(cell), *tbt, keeps,
                f"{cell['value']:.1f}", ", ".join(chip).strip(", "),
            ]
        )  # fmt: skip
    head = ["limit", "policy", "TBT p50, ms", "p99", "max", "keeps it", "prompts, tokens/ms",
            "MHz, W"]  # fmt: skip
    return rows_or_none(head, rows)


def _limit_ms(cell: Cell) -> float:
    return float(cell["case"]["limit"].removesuffix("ms"))


def _policy(cell: Cell) -> str:
    """A policy and its setting, if it has one."""
    name, setting = cell["case"]["policy"], cell.get("setting")
    return f"`{name}`" if setting is None else f"`{name}`, {setting}"


def steady_table(cells: Iterable[Cell]) -> str:
    """A decode step alone and beside prompts, and the prompts' tokens per ms, by decode SMs."""
    cells = list(cells)
    steady = of(cells, cases.STEADY)
    parts = []
    kinds = {(c["provider"] != cases.OURS, _index(c["case"]["model"]), *_kind(c)) for c in steady}
    for *_, model, provider in sorted(kinds):
        members = [cell for cell in steady if _kind(cell) == (model, provider)]
        entries = [
            (label, cell["case"]["rung"], format(cell[name], style))
            for label, name, style in STEADY_FIGURES
            for cell in members
        ]
        alone = [c["value"] for c in of(cells, cases.ALONE) if _kind(c) == (model, provider)]
        said = f"; alone on the whole device {alone[0]:.1f} tokens/ms" if alone else ""
        by = "stock kernels" if provider == cases.STOCK else provider
        parts.append(f"{model}, {by}{said}:\n\n{pivot('decode SMs', entries)}")
    return "\n\n".join(parts) or NOT_MEASURED


def _kind(cell: Cell) -> tuple[str, str]:
    return cell["case"]["model"], cell["provider"]


def costs_table(cells: Iterable[Cell]) -> str:
    """What the runtime costs: value and limit of each of its rows."""
    cells = list(cells)
    rows = []
    for name, label in COSTS.items():
        found = [cell for cell in of(cells, name) if cell["provider"] == cases.OURS]
        found.sort(key=lambda cell: _index(cell["case"]["model"]))
        rows += [_cost(cell, name, label) for cell in found]
    queues = of(cells, cases.QUEUES)
    if queues:
        shared = sum(cell["value"] for cell in queues)
        rows.append(["rungs whose lanes share a hardware queue", f"{shared} of {len(queues)}", ""])
    return rows_or_none(["what", "value", "limit"], rows)


def _cost(cell: Cell, name: str, label: str) -> list[str]:
    more = {k: v for k, v in cell["case"].items() if k not in ("model", "name")}
    said = ", beside decode" if more.pop("beside", False) else ""
    said += "".join(f", {v} {k}" for k, v in more.items())
    limit = MOST.get(name, LEAST.get(name))
    value = f"{cell['value']:g}" + (f" (p99 {cell['p99']:g})" if "p99" in cell else "")
    shown = "" if limit is None else f"{limit:g}"
    return [f"{cell['case']['model']}: {label}{said}", value, shown]


def ablation_table(cells: Iterable[Cell]) -> str:
    """TBT and prompts' tokens per ms with everything, and with parts turned off."""
    cells = list(cells)
    p50, p99 = (
        {cell["case"]["variant"]: cell for cell in of(cells, f"{cases.ABLATION}_tbt_p{n}_ms")}
        for n in (50, 99)
    )
    rows = [
        [
            label,
            f"{p50[name]['value']:.2f}",
            f"{p99[name]['value']:.2f}",
            f"{p50[name]['tokens_per_ms']:.1f}",
        ]
        for name, label in VARIANTS.items()
        if name in p50 and name in p99
    ]
    return rows_or_none(["launching", "TBT p50, ms", "p99", "prompts, tokens/ms"], rows)
