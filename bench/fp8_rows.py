"""Rows of products in e4m3: over bf16's and peers' speed, and over bf16's errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from smkern.bench import fp8_grouped
from smkern.bench.peers import TITLES
from smkern.bench.rows import Cell, geomean, not_measured, settled, target_row

FEW_ROWS, FEW_SMS = 64, 48
MANY_ROWS, MANY_SMS = 1024, 60
TIMES_FEW = 1.8
"""Times bf16's speed for up to `FEW_ROWS` rows on up to `FEW_SMS` SMs."""
TIMES_MANY = {"tensor": 1.75, "row": 1.75, "block": 1.6}
"""The same from `MANY_ROWS` rows and `MANY_SMS` SMs on."""
TIMES_EXPERTS = 1.5
"""The same of experts."""
OVER_BEST = 1.1
OVER_ERROR = 1.2
"""The most that an error may be of bf16's."""


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """How many times bf16's speed, by scales; prompts and the worst cell beside the best of all."""
    cells = list(cells)
    every = [c for c in cells if c["provider"] == "smkern"]
    if not every:
        return {}
    ours = [c for c in every if "experts" not in c["case"]]
    found: dict[str, Any] = _of_experts(cells, every)
    for kind, many in TIMES_MANY.items():
        mine = [c for c in ours if c["case"]["scales"] == kind]
        for name, part, target in (
            ("few_rows", [c for c in mine if _is_few(c)], TIMES_FEW),
            ("many_rows", [c for c in mine if _is_many(c)], many),
        ):
            times = list(times_of(cells, part, "bf16"))
            found[f"fp8_{kind}_{name}_times_bf16"] = target_row(geomean(times), target, len(times))
        times = list(times_of(cells, mine, "bf16"))
        worst = min(times, default=None)
        found[f"fp8_{kind}_worst_times_bf16"] = target_row(worst, None, len(times))
        found[f"fp8_{kind}_error_over_bf16"] = _of_errors(cells, mine)
    for peer in TITLES:
        if times := list(times_of(cells, every, peer)):
            found[f"fp8_block_times_{peer}"] = target_row(geomean(times), None, len(times))
    prompts = [settled(c) for c in ours if c.get("vs_best") and _is_many(c)]
    found["fp8_many_rows_vs_best"] = target_row(geomean(prompts), OVER_BEST, len(prompts))
    leads = [settled(c) for c in ours if c.get("vs_best")]
    found["fp8_worst_vs_best"] = target_row(min(leads, default=None), 1.0, len(leads))
    return found | {"fp8_not_measured": not_measured(every, _name)}


def _of_experts(cells: Iterable[Cell], ours: Iterable[Cell]) -> dict[str, Any]:
    """Times bf16's speed of grouped products, by scales and tokens."""
    found = {}
    for kind, tokens in product(fp8_grouped.KINDS, fp8_grouped.TOKENS):
        about = {"scales": kind, "tokens": tokens}
        mine = [c for c in ours if about.items() <= c["case"].items()]
        times = list(times_of(cells, mine, "bf16"))
        name = f"fp8_{kind}_experts_{tokens}_tokens"
        found[f"{name}_times_bf16"] = target_row(geomean(times), TIMES_EXPERTS, len(times))
    experts = [c for c in ours if "experts" in c["case"]]
    return found | {"fp8_experts_error_over_bf16": _of_errors(cells, experts)}


def _of_errors(cells: Iterable[Cell], ours: Iterable[Cell]) -> dict[str, Any]:
    """Our largest error over bf16's of the same product."""
    plain = {
        _key(c): c["relative_error"]
        for c in cells
        if c["provider"] == "bf16" and c.get("relative_error")
    }
    found = [
        c["relative_error"] / plain[_key(c)]
        for c in ours
        if c.get("relative_error") and _key(c) in plain
    ]
    return target_row(max(found, default=None), OVER_ERROR, len(found), at_most=True)


def times_of(cells: Iterable[Cell], ours: Iterable[Cell], peer: str) -> Iterator[float]:
    """A peer's time over each of our cells', where both were measured; the peer's best counts."""
    best: dict[Any, float] = {}
    for cell in cells:
        if cell["provider"] == peer and cell.get("us"):
            best[_key(cell)] = min(cell["us"], best.get(_key(cell), cell["us"]))
    for cell in ours:
        if cell.get("us") and _key(cell) in best:
            yield best[_key(cell)] / cell["us"]


def _is_few(cell: Cell) -> bool:
    return cell["case"]["m"] <= FEW_ROWS and cell["num_sms"] <= FEW_SMS


def _is_many(cell: Cell) -> bool:
    return cell["case"]["m"] >= MANY_ROWS and cell["num_sms"] >= MANY_SMS


def _key(cell: Cell) -> tuple[str, int]:
    return cell["case"]["name"], cell["num_sms"]


def _name(cell: Cell) -> dict[str, Any]:
    return {"name": cell["case"]["name"], "num_sms": cell["num_sms"]}
