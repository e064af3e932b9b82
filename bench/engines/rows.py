"""The summary: smkern over stock vLLM under each limit, and its attention inside vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smkern.bench.engines.cases import (
    ATTENTION,
    DECODE,
    OURS,
    PREFILL,
    SERVED,
    STOCK,
    VLLM,
    WINDOW,
    Cell,
)
from smkern.bench.rows import target_row

TARGETS = {("qwen3-8b", "15ms"): 1.9, ("qwen3-8b", "20ms"): 1.4, ("qwen3-8b", "30ms"): 1.2}
"""Of the `Multiplexer`'s prompt tokens a millisecond, over stock vLLM's, by model and limit."""


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """Ratios over stock vLLM, above 1 where smkern is better, by model and provider.

    Whose 99th percentile missed the limit is told under `missed`; a target is met within it only,
    and where stock missed it there is no ratio.
    """
    rows: dict[str, Any] = {}
    for model in dict.fromkeys(cell["case"]["model"] for cell in cells):
        of_model = [cell for cell in cells if cell["case"]["model"] == model]
        rows |= {f"{model} {name}": row for name, row in _rows(model, of_model).items()}
    return rows


def _rows(model: str, cells: Sequence[Cell]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for limit in _limits(cells, SERVED):
        for provider, base in STOCK.items():
            ours, stock = (_of(cells, x, SERVED, limit) for x in (provider, base))
            target = TARGETS.get((model, limit)) if provider == OURS else None
            if ours is None and (target is None or stock is None):
                continue
            row = _ratio(ours, stock, target)
            late = [x for x in (ours, stock) if x and x["tbt_p99_ms"] > float(limit[:-2])]
            if late:
                row["missed"] = {x["provider"]: x["tbt_p99_ms"] for x in late}
            if stock in late:
                row["value"] = None
            if target is not None and ours in late:
                row["met"] = False
            rows[f"{provider}_over_{base}_{limit}"] = row
    for provider, base in STOCK.items():
        for name in (DECODE, PREFILL):
            ours, stock = (_of(cells, x, name) for x in (provider, base))
            if ours is None:
                continue
            target = 1.0 if provider == ATTENTION else None
            # decode's are times: the other way round
            one, other = (stock, ours) if name == DECODE else (ours, stock)
            rows[f"{provider}_over_{base}_{name}"] = _ratio(one, other, target)
    for limit in _limits(cells, WINDOW):
        stock = next(iter(_measured(cells, VLLM, WINDOW, limit)), None)
        for cell in _measured(cells, OURS, WINDOW, limit):
            case = cell["case"]
            name = f"{case['policy']} {case['order']}"
            rows[f"{case['trace']} {limit} {name}_over_vllm"] = _ratio(cell, stock, None)
    return rows


def _limits(cells: Sequence[Cell], name: str) -> list[str]:
    found = {cell["case"]["limit"] for cell in cells if cell["case"]["name"] == name}
    return sorted(found, key=lambda text: float(text.removesuffix("ms")))


def _measured(cells: Sequence[Cell], provider: str, name: str, limit: str | None) -> list[Cell]:
    return [
        cell
        for cell in cells
        if (cell["provider"], cell["case"]["name"], cell["case"].get("limit"))
        == (provider, name, limit)
        and not cell.get("error")
    ]


def _of(cells: Sequence[Cell], provider: str, name: str, limit: str | None = None) -> Cell | None:
    """A provider's cell; of several the best of those that kept the limit, if there are any."""
    found = _measured(cells, provider, name, limit)
    kept = [x for x in found if limit is None or x["tbt_p99_ms"] <= float(limit[:-2])]
    return max(kept or found, key=lambda cell: float(cell["value"]), default=None)


def _ratio(one: Cell | None, other: Cell | None, target: float | None) -> dict[str, Any]:
    value = None if one is None or other is None else one["value"] / other["value"]
    return target_row(value, target, (one is not None) + (other is not None))
