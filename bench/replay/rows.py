"""What replays show: the best policy of each cell, gains over chunking, simulated against real."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from smkern.bench.replay.cases import Cell, beyond_table
from smkern.bench.replay.measure import BOUND
from smkern.bench.replay.oracle import ORACLE
from smkern.bench.rows import target_row, worst_row

OURS, CHUNKED = "adaptive", "chunked"
GAIN_AT = {"qwen3-8b": 15.0, "qwen3-32b": 40.0}
"""Limits at which our policy is held against chunking, ms."""
GAIN_ON = (
    "azure-conversation",
    "mooncake-conversation",
    "openthoughts-like",
    "writing-like",
    "rewriting-like",
)
NOISE = 0.02
"""Goodputs of other draws of a cell differ by as much, of their size."""
NEAR = 0.9
"""Part of a goodput from which on a replay confirms it or does not."""
FIGURES = (("tbt_ms", "p50"), ("tbt_ms", "p99"), ("ttft_ms", "p50"), ("ttft_ms", "p99"))
"""What a simulated replay is held against a real one by."""
FIGURE_NAMES = tuple(f"{name.removesuffix('_ms')} {part}" for name, part in FIGURES)

Place = tuple[str, str, float]
"""Model, trace, limit."""


def goodputs(cells: Sequence[Cell]) -> dict[Place, dict[str, dict[str, Cell]]]:
    """Goodput cells of the table by place, policy and order, without bounds."""
    found: dict[Place, dict[str, dict[str, Cell]]] = {}
    for cell in cells:
        case = cell["case"]
        if cell["op"] != "replay" or cell["provider"] == BOUND or beyond_table(cell):
            continue
        if cell.get("goodput_rps") is not None:
            place = case["model"], case["trace"], case["tbt_slo_ms"]
            found.setdefault(place, {}).setdefault(cell["provider"], {})[case["order"]] = cell
    return dict(sorted(found.items()))


def best(by_order: dict[str, Cell]) -> Cell:
    """Of a policy in several orders the highest goodput."""
    return max(by_order.values(), key=lambda cell: cell["goodput_rps"])


def rivals(policies: dict[str, dict[str, Cell]]) -> list[Cell]:
    """The others of a place, each in its best order; none of them can know the future."""
    return [best(by_order) for name, by_order in policies.items() if name not in (OURS, ORACLE)]


def against_best(cells: Sequence[Cell]) -> list[Cell]:
    """Our goodput over the best of all others, each in its best order."""
    found = []
    for (model, trace, limit), policies in goodputs(cells).items():
        rate = max((cell["goodput_rps"] for cell in rivals(policies)), default=0.0)
        if OURS in policies and rate:
            ratio = best(policies[OURS])["goodput_rps"] / rate
            case = {"model": model, "trace": trace, "tbt_slo_ms": limit}
            found.append({"case": case, "ratio": ratio})
    return found


def over_chunked(cells: Sequence[Cell]) -> list[Cell]:
    """Our goodput over chunking's in the same order, where decode is heavy and limits are tight."""
    found = []
    for (model, trace, limit), policies in goodputs(cells).items():
        if GAIN_AT.get(model) != limit or trace not in GAIN_ON:
            continue
        ours, chunked = policies.get(OURS, {}), policies.get(CHUNKED, {})
        for order in ours.keys() & chunked.keys():
            if chunked[order]["goodput_rps"]:
                ratio = ours[order]["goodput_rps"] / chunked[order]["goodput_rps"]
                case = {"model": model, "trace": trace, "tbt_slo_ms": limit, "order": order}
                found.append({"case": case, "ratio": ratio})
    return found


def of_oracle(cells: Sequence[Cell]) -> list[Cell]:
    """Our gain over chunking as a part of the greedy oracle's, in the same order.

    Left out where the oracle's is no more than searches of one cell differ by, or another draw.
    """
    found = []
    for (model, trace, limit), policies in goodputs(cells).items():
        for order, cell in policies.get(ORACLE, {}).items():
            ours, chunked = (policies.get(x, {}).get(order) for x in (OURS, CHUNKED))
            if ours is None or chunked is None:
                continue
            gain, its = (x["goodput_rps"] - chunked["goodput_rps"] for x in (ours, cell))
            case = {"model": model, "trace": trace, "tbt_slo_ms": limit, "order": order}
            if its > NOISE * chunked["goodput_rps"]:
                found.append({"case": case, "ratio": gain / its})
    return found


def confirming(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Replays on a GPU at about a goodput; at a lower rate every policy keeps its limits."""
    return (cell for cell in cells if cell.get("factor", 0.0) >= NEAR)


def pairs(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """(simulated, real) replays of the same requests."""
    known: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in cells:
        case = dict(cell["case"])
        where = case.pop("where", None)
        if where is not None:
            key = (cell["provider"], cell.get("n"), *sorted(case.items()))
            known.setdefault(key, {})[where] = cell
    for both in known.values():
        if len(both) == 2:
            yield both["simulated"], both["gpu"]


def errors(simulated: Cell, real: Cell) -> dict[str, float]:
    """Simulated over real less 1, by figure; those that both have."""
    found = {}
    for title, (name, part) in zip(FIGURE_NAMES, FIGURES, strict=True):
        ours, its = simulated[name][part], real[name][part]
        if ours and its:
            found[title] = ours / its - 1.0
    return found


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """Rows of what is there."""

    def named(cell: Cell) -> dict[str, Any]:
        return dict(cell["case"])

    found: dict[str, Any] = {}
    if ratios := against_best(cells):
        found["adaptive_vs_best"] = worst_row(ratios, lambda cell: cell["ratio"], 0.98, named)
    if gains := over_chunked(cells):
        found["adaptive_over_chunked"] = worst_row(gains, lambda cell: cell["ratio"], 1.25, named)
    if parts := of_oracle(cells):
        found["adaptive_of_oracle_gain"] = worst_row(parts, lambda cell: cell["ratio"], 0.9, named)
    served = [*confirming(cells)]
    if served:
        kept = sum(cell["is_expected"] for cell in served) / len(served)
        found["goodput_confirmed"] = target_row(kept, 1.0, len(served))
    off = [
        {"case": real["case"] | {"figure": name}, "provider": real["provider"], "error": error}
        for simulated, real in pairs(cells)
        for name, error in errors(simulated, real).items()
    ]
    if off:
        found["simulated_vs_real"] = worst_row(
            off, lambda cell: abs(cell["error"]), 0.10, named, at_most=True
        )
    return found
