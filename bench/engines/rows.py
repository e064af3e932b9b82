"""The summary: smkern over stock vLLM under each limit, and its attention inside vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smkern.bench.engines.cases import ATTENTION, DECODE, OURS, PREFILL, SERVED, VLLM, Cell
from smkern.bench.rows import target_row

TARGETS = {"15ms": 1.9, "20ms": 1.4, "30ms": 1.2}
"""Of prompt tokens a millisecond, smkern's over stock vLLM's."""


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """Ratios over stock vLLM, above 1 where smkern is better; only of rows that kept their limit.

    A rate whose 99th percentile missed the limit is told beside, under `missed`.
    """
    limits = [cell["case"]["limit"] for cell in cells if cell["case"]["name"] == SERVED]
    rows: dict[str, Any] = {}
    for limit in sorted(set(limits), key=lambda text: float(text.removesuffix("ms"))):
        for provider, target in ((OURS, TARGETS.get(limit)), (ATTENTION, None)):
            ours, stock = (_of(cells, x, SERVED, limit) for x in (provider, VLLM))
            row = _ratio(ours, stock, target)
            late = [x for x in (ours, stock) if x and x["tbt_p99_ms"] > float(limit[:-2])]
            if late:
                row["missed"] = {x["provider"]: x["tbt_p99_ms"] for x in late}
            rows[f"{provider}_over_vllm_{limit}"] = row
    stock, ours = (_of(cells, x, DECODE) for x in (VLLM, ATTENTION))  # times: the other way round
    rows["attention_decode"] = _ratio(stock, ours, 1.0)
    rows["attention_prefill"] = _ratio(
        _of(cells, ATTENTION, PREFILL), _of(cells, VLLM, PREFILL), 1.0
    )
    return rows


def _of(cells: Sequence[Cell], provider: str, name: str, limit: str | None = None) -> Cell | None:
    for cell in cells:
        case = cell["case"]
        wanted = (provider, name, limit)
        if (cell["provider"], case["name"], case.get("limit")) == wanted and "error" not in cell:
            return cell
    return None


def _ratio(one: Cell | None, other: Cell | None, target: float | None) -> dict[str, Any]:
    value = None if one is None or other is None else one["value"] / other["value"]
    return target_row(value, target, (one is not None) + (other is not None))
