"""The rows that `runtime.json` must show, computed from its cells alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from smkern.bench.results import Results
from smkern.bench.rows import Row
from smkern.bench.runtime.cases import (
    AGGREGATED,
    AIMS,
    ALONE,
    GAIN,
    HANDOVER,
    HOST,
    MEMORY,
    MISMATCHES,
    OP,
    OURS,
    OVERHEAD,
    PACED,
    SOAK_LEAKS,
    SOAK_MINUTES,
    STEADY,
    SWITCH,
    Cell,
    gain_name,
    gap_name,
)

MOST = {
    MISMATCHES: 0,
    gap_name(1): 0.04,
    gap_name(2): 0.02,
    OVERHEAD: 0.01,
    HOST: 150.0,
    SWITCH: 50.0,
    MEMORY: 400.0,
    SOAK_LEAKS: 0,
}
"""Upper limit of a row, by name."""
LEAST = {SOAK_MINUTES: 60.0}
FOR_INFORMATION = (f"{HANDOVER}_p50", f"{HANDOVER}_p99")


def of(cells: Iterable[Cell], name: str, **case: Any) -> list[Cell]:
    """The measured cells of a name whose case has these values."""
    wanted = {"name": name, **case}
    return [
        cell
        for cell in cells
        if cell["op"] == OP
        and wanted.items() <= cell["case"].items()
        and not cell.get("error")
        and cell.get("value") is not None
    ]


def gains(cells: Iterable[Cell]) -> Iterator[Cell]:
    """`mux_over_aggregated_<limit>ms` of each model and provider that has both sides.

    Both sides are the best that keeps the limit in 99 of 100 steps, or where a side has none (of
    chunks: chosen for that limit), in the median of them (`kept_by`); `value_p50`: in the median in
    any case. `bound` is what it would be with decode free of charge: prompts alone on the whole
    device over chunked prefill.
    """
    cells = [cell for cell in cells if cell["op"] == OP]
    chunked = of(cells, AGGREGATED)
    kinds = dict.fromkeys((c["case"]["model"], c["provider"]) for c in chunked)
    for model, provider in kinds:
        steady, chunks = sides(cells, model, provider)
        free = [c for c in of(cells, ALONE, model=model) if c["provider"] == provider]
        for limit_ms in sorted({c["case"]["limit_ms"] for c in chunks}):
            if cell := _gain(model, provider, limit_ms, steady, chunks, free):
                yield cell


def sides(cells: Iterable[Cell], model: str, provider: str) -> tuple[list[Cell], list[Cell]]:
    """What a provider measured of a model beside decode, on rungs and paced, and of chunks."""
    own = [cell for cell in cells if cell["provider"] == provider]
    steady = [*of(own, STEADY, model=model), *of(own, PACED, model=model)]
    return steady, of(own, AGGREGATED, model=model)


def renew(results: Results) -> None:
    """Make the gains anew from the file's other cells."""
    results.drop(is_gain)
    for cell in gains(results.cells):
        results.add(cell)


def is_gain(cell: Cell) -> bool:
    """Whether a cell is one of `gains`."""
    return cell["op"] == OP and cell["case"]["name"].startswith(GAIN)


def gain_meets(cell: Mapping[str, Any]) -> bool:
    """Whether a gain reaches its aim as the limit is kept, and by the medians too."""
    by_p50 = cell.get("value_p50")
    return min(cell["value"], cell["value"] if by_p50 is None else by_p50) >= cell["aim"]


def _gain(
    model: str,
    provider: str,
    limit_ms: float,
    steady: Sequence[Cell],
    chunks: Sequence[Cell],
    free: Sequence[Cell],
) -> Cell | None:
    strict, loose = ((best(steady, key, limit_ms), best(chunks, key, limit_ms)) for key in KEPT_BY)
    # chunks that were chosen for smaller limits would make chunked prefill look worse than it is
    if not any(c["case"]["limit_ms"] == limit_ms and c[KEPT_BY[0]] <= limit_ms for c in chunks):
        strict = (None, None)
    mux, chunked = loose if None in strict else strict
    if mux is None or chunked is None:
        return None
    return {
        "op": OP,
        "case": {"model": model, "name": gain_name(limit_ms)},
        "provider": provider,
        "value": round(mux["value"] / chunked["value"], 4),
        "unit": "ratio",
        "value_p50": None if None in loose else round(loose[0]["value"] / loose[1]["value"], 4),
        "kept_by": "p50" if None in strict else "p99",
        "bound": round(free[0]["value"] / chunked["value"], 4) if free else None,
        "rung": mux["case"]["rung"],
        "paced": "limit_ms" in mux["case"],
        "mux_tokens_per_ms": mux["value"],
        "mux_tbt_p50_ms": mux["tbt_p50_ms"],
        "mux_tbt_p99_ms": mux["tbt_p99_ms"],
        "aggregated_tokens_per_ms": chunked["value"],
        "aggregated_tbt_p50_ms": chunked["tbt_p50_ms"],
        "aggregated_tbt_p99_ms": chunked["tbt_p99_ms"],
        "chunk": chunked["chunk"],
        "aim": AIMS.get((model, float(limit_ms))),
        **_rounds(mux, chunked),
    }


KEPT_BY = ("tbt_p99_ms", "tbt_p50_ms")
"""A limit is kept in 99 of 100 steps, or in half of them."""


def _rounds(*sides: Cell) -> dict[str, int]:
    """Rounds of the side with the fewest; nothing where each was measured once."""
    fewest = min(len(cell.get("rounds", [None])) for cell in sides)
    return {"rounds": fewest} if any("rounds" in cell for cell in sides) else {}


def best(cells: Iterable[Cell], key: str, limit_ms: float) -> Any:
    """The cell with the most tokens per ms among those that keep a limit."""
    kept = [cell for cell in cells if cell[key] <= limit_ms and cell["value"] > 0]
    return max(kept, key=lambda cell: cell["value"], default=None)


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Value, target and whether it is met, by row and model; {} where no cell is the suite's."""
    cells = [cell for cell in cells if cell["op"] == OP]
    if not cells:
        return {}
    rows: dict[str, Any] = {}
    for cell in cells:
        model, name = cell["case"]["model"], cell["case"]["name"]
        if row := _row(cell, name):
            rows.setdefault(model, {})[_title(cell, name)] = row
    failed = [{**c["case"], "error": c["error"]} for c in cells if c.get("error")]
    return {**rows, "not_measured": failed}


def _title(cell: Mapping[str, Any], name: str) -> str:
    more = [f"{k}={v}" for k, v in cell["case"].items() if k not in ("model", "name")]
    provider = [] if cell["provider"] == OURS else [cell["provider"]]
    return " ".join([name, *more, *provider])


def _row(cell: Cell, name: str) -> Row | None:
    """Value, target and whether it is met; without a target what stands for information."""
    value, target = cell.get("value"), cell.get("aim")
    if value is None:
        return None
    gains_more = is_gain(cell)
    least = gains_more or name in LEAST
    target = target if gains_more else LEAST.get(name, MOST.get(name))
    if target is None and not gains_more and name not in FOR_INFORMATION:
        return None
    if target is None or cell["provider"] != OURS:
        return {"value": value, "cells": 1}
    met = value >= target if least else value <= target
    if gains_more:
        met = gain_meets(cell)
    return {"value": value, "target": target, "met": met, "cells": 1}
