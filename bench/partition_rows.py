"""The summary of a partitions file: bandwidth against its targets and the best choice, costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smkern.bench.rows import Cell, target_row

Points = dict[int, float]

TARGET_TBPS = {8: 1.75, 16: 3.15, 24: 3.9, 32: 4.25, 48: 4.4}
"""SMs to the read bandwidth that the decode side of the default ladder must have."""
TARGET_OF_BEST = 0.97
OURS = "smkern"
PEERS = ("driver", "torch", "flashinfer-way")
ORDER = "order:"
"""Prefix of the candidates' providers."""


def bandwidth(cells: Iterable[Cell], provider: str) -> Points:
    """Granted SMs to TB/s of one provider."""
    found = (c for c in cells if c["op"] == "read" and c["provider"] == provider and c.get("tbps"))
    return dict(sorted((cell["num_sms"], cell["tbps"]) for cell in found))


def candidates(cells: Iterable[Cell]) -> dict[str, Points]:
    """Candidate order to its bandwidths."""
    held = list(cells)
    names = dict.fromkeys(c["provider"] for c in held if c["provider"].startswith(ORDER))
    return {name: bandwidth(held, name) for name in names}


def best_choice(cells: Iterable[Cell]) -> dict[int, tuple[float, str]]:
    """Granted SMs to (TB/s, provider) of the fastest choice of so many SMs, ours among them."""
    held = list(cells)
    choices = {name: bandwidth(held, name) for name in (OURS, *PEERS)} | candidates(held)
    best: dict[int, tuple[float, str]] = {}
    for name, points in choices.items():
        for n, tbps in points.items():
            best[n] = max(best.get(n, (0.0, "")), (tbps, name))
    return best


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """One entry a row of the claim: value, target, met."""
    ours = bandwidth(cells, OURS)
    rows: dict[str, Any] = {}
    for n, target in TARGET_TBPS.items():
        if n in ours:
            rows[f"bandwidth_tbps_{n}_sms"] = target_row(ours[n], target, 1)
    if ours:
        rows["of_best_choice"] = _of_best(ours, best_choice(cells))
    for peer in PEERS:
        shared = {n: round(ours[n] / v, 3) for n, v in bandwidth(cells, peer).items() if n in ours}
        if shared:
            rows[f"over_{peer}"] = {str(n): ratio for n, ratio in shared.items()}
    return rows | _costs(cells)


def _of_best(ours: Points, best: Mapping[int, tuple[float, str]]) -> dict[str, Any]:
    ratios = {n: tbps / best[n][0] for n, tbps in ours.items()}
    worst = min(ratios, key=lambda n: ratios[n])
    row = target_row(ratios[worst], TARGET_OF_BEST, len(ratios))
    return row | {"worst_at": worst, "best_there": best[worst][1], "rungs": len(ratios)}


def _costs(cells: Iterable[Cell]) -> dict[str, Any]:
    """The worst of each cost; a wrong answer of `current_num_sms` is a row that is not met."""
    rows: dict[str, Any] = {}
    for cell in cells:
        if cell["op"] != "partition_cost":
            continue
        case, unit = cell["case"], cell["unit"].lower()
        if "stream" in case:
            shown = ("value", "answer", "error")
            row = {key: cell[key] for key in shown if key in cell} | {"met": cell["right"]}
            rows[f"{case['name']}_{case['stream']}_{unit}"] = row
            continue
        name = f"{case['name']}_{unit}"
        if name not in rows or rows[name]["value"] < cell["value"]:
            rows[name] = {key: cell[key] for key in ("value", "target", "met") if key in cell}
    return rows
