"""The rows that an attention results file must show, computed from its cells alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from smkern.bench.attention.beside import OP as BESIDE
from smkern.bench.attention.cases import (
    CACHED_PROMPT,
    COLD,
    LONG,
    ONE_PROMPT,
    SKEWED,
    UNIFORM,
    UNIFORM_FP8,
)
from smkern.bench.rows import Cell, Row, geomean, not_measured, rounded, target_row, worst_row
from smkern.bench.rows import settled as ratio_that_counts

STREAMED = (UNIFORM.name, SKEWED.name, LONG.name)
DECODE_TBPS = {16: 1.7, 24: 2.45, 32: 3.0, 48: 3.65, 64: 3.95}
LARGE_SMS, LARGE_TBPS = 84, 4.0
"""Least TB/s of decode on so many SMs or more."""
COLD_US = {16: 26.0, 132: 16.0}
FP8_SPEEDUP = {16: 1.4, 48: 1.6, 132: 1.6}
BESIDE_LEAST, BESIDE_SMS = 0.85, (16, 24, 32)
"""Of the bandwidth of a reader beside the same products."""
FA3_LEAST = {84: 0.95, 100: 1.0, 116: 1.0}
PREFILL_TFLOPS = {ONE_PROMPT.name: 440.0, CACHED_PROMPT.name: 490.0}
FULL_SMS = 132


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """The rows over the cells as dispatched: value, target, whether it is met, how many cells.

    A row with no cells has a value of None and is neither met nor missed.
    """
    cells = list(cells)
    attention = [cell for cell in cells if cell["op"] == "paged_attention"]
    plans = [cell for cell in cells if cell["op"] == "plan_attention"]
    if not attention and not plans:
        return {}
    ours = [cell for cell in attention if cell["provider"] == "smkern"]
    measured = [cell for cell in ours if cell.get("us")]
    return {
        **_decode_rows(measured),
        **_beside_rows([cell for cell in cells if cell["op"] == BESIDE]),
        **_prefill_rows(measured),
        **_fp8_rows(measured),
        "plan_us": _least_or_most(plans, lambda c: c["us"], 5.0, at_most=True),
        "mixed_vs_flashinfer": _informal(measured, "mixed"),
        "vs_flashinfer_by_case": _by_case(measured),
        "not_measured": not_measured(ours + plans, cell_name),
    }


def _decode_rows(ours: Sequence[Cell]) -> dict[str, Row]:
    decode = [c for c in ours if c["case"]["kind"] == "decode"]
    streamed = [c for c in decode if c["case"]["name"] in STREAMED]
    rows = {}
    for num_sms, target in DECODE_TBPS.items():
        found = [c for c in streamed if c["group_sms"] == num_sms]
        rows[f"decode_tbps_{num_sms}_sms"] = _least_or_most(found, _tbps, target)
    large = [c for c in streamed if c["group_sms"] >= LARGE_SMS]
    rows[f"decode_tbps_from_{LARGE_SMS}_sms"] = _least_or_most(large, _tbps, LARGE_TBPS)
    rows["decode_skewed_over_uniform"] = _skewed_row(streamed)
    for num_sms, target in COLD_US.items():
        found = [c for c in decode if _is(c, COLD.name, num_sms)]
        rows[f"decode_cold_us_{num_sms}_sms"] = _least_or_most(
            found, lambda c: c["us"], target, at_most=True
        )
    beside = [c for c in decode if c.get("vs_flashinfer")]
    return rows | flashinfer_rows("decode", beside, 1.5)


def flashinfer_rows(what: str, beside: Sequence[Cell], least: float) -> dict[str, Row]:
    """Geomean and worst ratio to FlashInfer's best way, of our cells that have one."""
    return {
        f"{what}_geomean_vs_flashinfer": target_row(
            geomean(map(settled, beside)), least, len(beside)
        ),
        f"{what}_worst_vs_flashinfer": _least_or_most(beside, settled, 1.0),
    }


def _beside_rows(cells: Sequence[Cell]) -> dict[str, Row]:
    rows = {}
    for num_sms in BESIDE_SMS:
        found = [c for c in cells if _is(c, UNIFORM.name, num_sms)]
        rows[f"decode_beside_over_reader_{num_sms}_sms"] = _least_or_most(
            found, lambda c: c["fraction_of_beside_floor"], BESIDE_LEAST
        )
    return rows


def _prefill_rows(ours: Sequence[Cell]) -> dict[str, Row]:
    prefill = [c for c in ours if c["case"]["kind"] == "prefill"]
    full = {c["case"]["name"]: c["tflops"] for c in prefill if c["group_sms"] == FULL_SMS}
    scaled = [c for c in prefill if c["group_sms"] != FULL_SMS and c["case"]["name"] in full]

    def rate_an_sm(cell: Cell) -> float:
        whole = full[cell["case"]["name"]] / FULL_SMS
        return float(cell["tflops"] / cell["num_sms"] / whole)

    rows = {"prefill_rate_an_sm_over_132": _least_or_most(scaled, rate_an_sm, 0.93)}
    for num_sms, target in FA3_LEAST.items():
        found = [c for c in prefill if c["group_sms"] == num_sms and "flashinfer:fa3" in _vs(c)]
        rows[f"prefill_vs_fa3_{num_sms}_sms"] = _least_or_most(
            found, lambda c: _vs(c)["flashinfer:fa3"], target
        )
    for name, target in PREFILL_TFLOPS.items():
        found = [c for c in prefill if _is(c, name, FULL_SMS)]
        label = name.removeprefix("prefill-")
        rows[f"prefill_tflops_{label}"] = _least_or_most(found, lambda c: c["tflops"], target)
    return rows


def _fp8_rows(ours: Sequence[Cell]) -> dict[str, Row]:
    """Tokens a second with an fp8 cache over those with a bf16 one."""
    rows = {}
    for num_sms, target in FP8_SPEEDUP.items():
        wide, narrow = (
            next((c["us"] for c in ours if _is(c, name, num_sms)), None)
            for name in (UNIFORM.name, UNIFORM_FP8.name)
        )
        value = wide / narrow if wide and narrow else None
        rows[f"fp8_over_bf16_{num_sms}_sms"] = target_row(value, target, int(value is not None))
    return rows


def _skewed_row(streamed: Sequence[Cell]) -> Row:
    uniform = {c["group_sms"]: _tbps(c) for c in streamed if c["case"]["name"] == UNIFORM.name}
    skewed = [c for c in streamed if c["case"]["name"] == SKEWED.name and c["group_sms"] in uniform]
    return _least_or_most(skewed, lambda c: _tbps(c) / uniform[c["group_sms"]], 0.95)


def is_losing(cell: Cell) -> bool:
    """Whether one of our cells, as dispatched, is slower than FlashInfer's best way."""
    return cell["provider"] == "smkern" and (cell.get("vs_flashinfer") or 1.0) < 1.0


def settled(cell: Cell) -> float:
    """The ratio to FlashInfer that counts: of the second measurement where there is one."""
    return ratio_that_counts(cell, "vs_flashinfer")


def _by_case(ours: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Case to SM count to the ratio to FlashInfer's best way."""
    table: dict[str, dict[str, float]] = {}
    for cell in ours:
        if cell.get("vs_flashinfer"):
            row = table.setdefault(cell["case"]["name"], {})
            row[str(cell["group_sms"])] = settled(cell)
    return table


def _informal(ours: Sequence[Cell], kind: str) -> Row:
    """A row without a target: the geomean and the worst ratio to FlashInfer's best way."""
    found = [c for c in ours if c["case"]["kind"] == kind and c.get("vs_flashinfer")]
    return {
        "value": rounded(geomean(map(settled, found))),
        "worst": min(map(settled, found), default=None),
        "cells": len(found),
    }


def _least_or_most(
    cells: Sequence[Cell], value: Callable[[Cell], float], target: float, *, at_most: bool = False
) -> Row:
    found = [cell for cell in cells if not cell.get("error")]
    return worst_row(found, value, target, cell_name, at_most=at_most)


def _is(cell: Cell, name: str, num_sms: int) -> bool:
    return bool(cell["case"]["name"] == name and cell["group_sms"] == num_sms)


def _tbps(cell: Cell) -> float:
    return float(cell["tbps"])


def _vs(cell: Cell) -> dict[str, float]:
    """Each peer's time over ours; of the second measurement where there is one."""
    return cell.get("vs_again") or cell.get("vs") or {}


def cell_name(cell: Cell) -> dict[str, Any]:
    return {"case": cell["case"]["name"], "num_sms": cell["num_sms"]}
