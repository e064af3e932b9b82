"""The rows that a GEMM results file must show, computed from its cells alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from smkern.bench.rows import (
    Cell,
    Row,
    geomean,
    grouped,
    not_measured,
    rounded,
    settled,
    target_row,
    worst_row,
)

TFLOPS_PER_SM = 8.1
"""Dense bf16 rate of an H200's SM: 4,096 FLOP a clock at 1.98 GHz."""

OURS = ("smkern", "smkern:static", "smkern:triton")
GEOMEAN_TARGET = {"smkern": 1.20, "smkern:static": 1.20, "smkern:triton": 1.10}
WORST_TARGET = {"smkern": 0.97, "smkern:static": 0.97, "smkern:triton": 0.90}
STREAMING = (28672, 4096)
NARROW_BUDGETS = (16, 24)
"""Budgets whose spread partition reads 3.2 and 4.0 TB/s: compute and latency bind earlier."""


def is_losing(cell: Cell, limits: Mapping[str, float] = WORST_TARGET) -> bool:
    """Whether one of our cells is slower against cuBLAS than its provider's limit."""
    limit = limits.get(cell["provider"])
    return limit is not None and cell.get("vs_cublas") is not None and cell["vs_cublas"] < limit


def by_problem(cells: Iterable[Cell]) -> list[dict[str, Cell]]:
    """The measured cells of each problem and SM count, by provider."""
    sizes = ("m", "n", "k")
    groups = grouped(
        (cell for cell in cells if cell.get("us")),
        lambda cell: (*(cell["case"][size] for size in sizes), cell["num_sms"]),
    )
    return [{cell["provider"]: cell for cell in group} for group in groups.values()]


def compared(cells: Iterable[Cell], provider: str) -> list[Cell]:
    """The provider's GEMM cells that have a ratio to cuBLAS in the same partition."""
    return [
        cell
        for cell in cells
        if cell["op"] == "gemm"
        and cell["provider"] == provider
        and cell.get("vs_cublas") is not None
    ]


def settled_ratio(cell: Cell) -> float:
    """The ratio to cuBLAS that counts: of the second measurement where there is one."""
    return settled(cell, "vs_cublas")


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Targets over the cells of `gemm`: value, target, whether it is met, how many cells.

    A row with no cells has a value of None and is neither met nor missed.
    """
    gemms = [cell for cell in cells if cell["op"] == "gemm"]
    measured = [cell for cell in gemms if cell.get("us")]
    if not gemms:
        return {}
    by = defaultdict(list, grouped(measured, lambda cell: str(cell["provider"])))
    summary: dict[str, Any] = {
        "geomean_vs_cublas": {p: _geomean_row(by[p], GEOMEAN_TARGET[p]) for p in OURS},
        "worst_vs_cublas": {p: _worst_row(by[p], WORST_TARGET[p]) for p in OURS},
        "geomean_vs_cublas_by_budget": {p: _by_budget(by[p]) for p in OURS},
        "tensor_fraction_m2048_up_to_60_sms": {p: _tensor_row(by[p]) for p in OURS},
        "vs_cublas_full_m2048": {p: _full_row(by[p]) for p in OURS},
        "streaming_m32": _streaming_row(by["smkern"], narrow=False),
        "streaming_m32_at_16_and_24": _streaming_row(by["smkern"], narrow=True),
        "streaming_m64": _m64_row(by["smkern"]),
        "model_over_tuned": _model_row(by),
        "wrong_budget_over_smkern": _times_row(by, "wrong-budget"),
        "cublaslt_dispatched": _library_row(by["smkern"]),
        # cuBLAS on a small partition may well have no figures
        "not_measured": not_measured((c for c in gemms if c["provider"] != "cublas"), _name),
    }
    return summary


def _compared(cells: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.get("vs_cublas") is not None]


def _geomean_row(cells: list[Cell], target: float) -> Row:
    compared = _compared(cells)
    return target_row(geomean(settled_ratio(c) for c in compared), target, len(compared))


def _by_budget(cells: list[Cell]) -> dict[str, float | None]:
    budgets = sorted({cell["group_sms"] for cell in _compared(cells)})
    return {
        str(n): rounded(geomean(settled_ratio(c) for c in _compared(cells) if c["group_sms"] == n))
        for n in budgets
    }


def _worst_row(cells: list[Cell], target: float) -> Row:
    """The worst cell after the second measurement, and all that lost in the first."""
    compared = sorted(_compared(cells), key=settled_ratio)
    worst = settled_ratio(compared[0]) if compared else None
    losing = [cell for cell in compared if settled_ratio(cell) < target]
    lost_first = [c for c in compared if c["vs_cublas"] < target]
    return target_row(worst, target, len(compared)) | {
        "losing": len(losing),
        "losing_at_first": len(lost_first),
        "worst": [_name(c) | _ratios(c) for c in compared[:12]],
    }


def _ratios(cell: Cell) -> dict[str, Any]:
    names = ("vs_cublas", "vs_cublas_again", "us", "us_again", "config", "source")
    return {name: cell[name] for name in names if name in cell}


def _name(cell: Cell) -> dict[str, Any]:
    case = cell["case"]
    sizes = {name: case[name] for name in ("m", "n", "k")}
    return sizes | {"num_sms": cell["num_sms"], "provider": cell["provider"]}


def _tensor_row(cells: list[Cell]) -> Row:
    """Fraction of 8.1 TFLOP/s per SM at M >= 2048 and up to 60 SMs; the worst cell counts."""
    found = [c for c in cells if c["case"]["m"] >= 2048 and c["num_sms"] <= 60]
    fractions = {id(c): c["tflops"] / (TFLOPS_PER_SM * c["num_sms"]) for c in found}
    return _least(found, lambda c: fractions[id(c)], 0.82)


def _full_row(cells: list[Cell]) -> Row:
    """Against cuBLAS on the whole chip at M >= 2048; the worst cell counts."""
    found = [c for c in _compared(cells) if c["case"]["m"] >= 2048 and c["mode"] == "full"]
    return _least(found, settled_ratio, 0.94)


def _streams(cells: list[Cell]) -> list[Cell]:
    return [c for c in cells if (c["case"]["n"], c["case"]["k"]) == STREAMING]


def _streaming_row(cells: list[Cell], *, narrow: bool) -> Row:
    """Fraction of the partition's read bandwidth at M <= 32; the worst cell counts."""
    found = [
        c
        for c in _streams(cells)
        if c["case"]["m"] <= 32 and (c["num_sms"] in NARROW_BUDGETS) == narrow
    ]
    return _least(found, lambda c: c["fraction_of_bandwidth"], 0.75 if narrow else 0.85)


def _m64_row(cells: list[Cell]) -> Row:
    """Fraction of the smaller of bandwidth and tensor peak at M = 64; the worst cell counts."""
    found = [c for c in _streams(cells) if c["case"]["m"] == 64]
    return _least(found, lambda c: c["fraction_of_ceiling"], 0.78)


def _least(cells: list[Cell], value: Callable[[Cell], float], target: float) -> Row:
    row = worst_row(cells, value, target, _name)
    row["below_target"] = sum(value(cell) < target for cell in cells)
    row["geomean"] = rounded(geomean(value(cell) for cell in sorted(cells, key=value)))
    return row


def _pairs(by: Mapping[str, list[Cell]], provider: str, base: str) -> list[tuple[Cell, Cell]]:
    """Cells of `provider` beside `base`'s of the same group."""
    bases = {_group(cell): cell for cell in by[base]}
    found = by[provider]
    return [(cell, bases[_group(cell)]) for cell in found if _group(cell) in bases]


def _group(cell: Cell) -> tuple[int, int, int, int]:
    case = cell["case"]
    return case["m"], case["n"], case["k"], cell["group_sms"]


def _model_row(by: Mapping[str, list[Cell]]) -> Row:
    """Time by the cost model alone over time by the tuned table, both by our own kernels."""
    pairs = _pairs(by, "smkern:model", "smkern:triton")
    value = geomean(model["us"] / tuned["us"] for model, tuned in pairs)
    row = target_row(value, 1.08, len(pairs), at_most=True)
    row["tuned_cells"] = sum(tuned.get("source") == "table" for _, tuned in pairs)
    return row


def _times_row(by: Mapping[str, list[Cell]], provider: str) -> Row:
    """How much slower `provider` is than smkern as dispatched; for information."""
    pairs = _pairs(by, provider, "smkern")
    ratios = [slow["us"] / fast["us"] for slow, fast in pairs]
    return {
        "value": rounded(geomean(ratios)),
        "worst": rounded(max(ratios, default=None)),
        "cells": len(pairs),
    }


def _library_row(cells: list[Cell]) -> Row:
    """Cells where dispatch chose cuBLASLt, and where our own kernels would have run."""
    won = [cell for cell in cells if cell.get("config") == "cublaslt"]
    return {"cells": len(won), "of": len(cells), "won": [_name(cell) for cell in won]}
