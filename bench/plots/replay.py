"""Pictures of replays' cells, all policies in one: over the rate, and over the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from smkern.bench.replay.cases import beyond_table
from smkern.bench.results import Results
from smkern.bench.rows import Cell
from smkern.panels import Picture
from smkern.replay import plots

Lines = dict[str, list[tuple[float, float]]]

LATENCIES = {"TTFT p99": ("ttft_ms", "p99"), "TBT p99": ("tbt_ms", "p99")}


def pictures(results: Results) -> Iterator[Picture]:
    """All pictures of a results file."""
    yield from rates_pictures(results.cells)
    yield from limits_picture(results.cells)


def rates_pictures(cells: Sequence[Cell]) -> Iterator[Picture]:
    """Attainment and latency over the rate: a picture a model, trace, limit and order."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        case = cell["case"]
        if "rate_rps" in case and cell.get("slo_attainment") is not None:
            key = (case["model"], case["trace"], case["tbt_slo_ms"], case["order"], case["where"])
            groups.setdefault(key, []).append(cell)
    for (model, trace, limit, order, where), found in groups.items():
        attainment: Lines = {}
        latency: dict[str, Lines] = {title: {} for title in LATENCIES}
        for cell in found:
            rate, policy = cell["case"]["rate_rps"], cell["provider"]
            attainment.setdefault(policy, []).append((rate, cell["slo_attainment"]))
            for title, (name, part) in LATENCIES.items():
                value = cell[name][part]
                if value is not None:
                    latency[title].setdefault(policy, []).append((rate, value))
        name = f"replay-rates-{model}-{trace}-{limit:g}-{order}-{where}"
        heading = f"{model}, {trace}, p99 TBT within {limit:g} ms, {order} ({where})"
        yield plots.rates_picture(name, heading, attainment, dict(latency))


def limits_picture(cells: Sequence[Cell]) -> Iterator[Picture]:
    """Goodput over the limit: a picture a model, a panel a trace, each policy at its best order."""
    models: dict[str, dict[str, dict[str, dict[float, float]]]] = {}
    for cell in cells:
        case, rate = cell["case"], cell.get("goodput_rps")
        if rate is None or beyond_table(cell) or case["tbt_slo_ms"] is None:
            continue
        line = models.setdefault(case["model"], {}).setdefault(case["trace"], {})
        points = line.setdefault(cell["provider"], {})
        points[case["tbt_slo_ms"]] = max(points.get(case["tbt_slo_ms"], 0.0), rate)
    for model, traces in models.items():
        lines = {
            trace: {policy: sorted(points.items()) for policy, points in by_policy.items()}
            for trace, by_policy in traces.items()
        }
        heading = f"Goodput over the limit of TBT, {model}, each policy in its best order"
        yield plots.limits_picture(f"replay-goodput-{model}", heading, lines)
