"""The rows that a model results file must show, computed from its cells alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from smkern.bench.model import fp8_rows
from smkern.bench.model.cases import SINGLE_LIMIT, limit_of
from smkern.bench.model.fp8_rows import is_fp8
from smkern.bench.rows import Cell, Row, geomean, not_measured, rounded, worst_row

DECODE, PREFILL, LAUNCH, KERNEL = "decode_step", "prefill", "layer_launch", "decode_kernel"
OPS = (DECODE, PREFILL, LAUNCH, KERNEL)
GEMM_SHARE = 0.80
"""Least rate of a prefill over that of our GEMMs by themselves."""
PER_SM_SHARE = 0.92
"""Least rate per SM of a partition over the whole chip's."""
SLOWER_STEP = 1.02
"""A step on more SMs over the fastest on fewer."""
ABOVE_LINE = 1.08
"""A step over the mean of those on two SMs less and two more."""
LAUNCH_US = 120.0
"""Host time that launching one layer may take."""


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Value, target, whether it is met, how many cells; {} where no cell is the suite's.

    A decode row is the worst batch of its model and partition; models in fp8 have rows of their
    own, over bf16.
    """
    cells = [cell for cell in cells if cell["op"] in OPS]
    if not cells:
        return {}
    measured = [cell for cell in cells if cell.get("us") or cell.get("value")]
    decode, prefill = (of(measured, op) for op in (DECODE, PREFILL))
    steps, prompts = ([c for c in found if is_plain(c)] for found in (decode, prefill))
    return {
        **_decode_rows([c for c in steps if not is_fp8(c)]),
        **_prefill_rows([c for c in prompts if not is_fp8(c)]),
        **_step_rows(steps),
        **fp8_rows.decode_rows(steps),
        **fp8_rows.prefill_rows(prompts),
        "decode_beside_over_alone": _beside_row([c for c in decode if not is_fp8(c)]),
        "overlap_gain": _overlap_row(decode),
        "layer_launch_us": _worst(of(measured, LAUNCH), lambda c: c["value"], LAUNCH_US),
        "not_measured": not_measured(cells, _name),
    }


def of(cells: Iterable[Cell], op: str) -> list[Cell]:
    return [cell for cell in cells if cell["op"] == op]


def is_plain(cell: Cell) -> bool:
    """Whether it was measured alone, and with kernels that overlap their neighbours."""
    return not cell["case"].get("beside") and cell["case"].get("overlap", True)


def _decode_rows(cells: Sequence[Cell]) -> dict[str, Row]:
    """By partition, the worst time over its floor; batch 1 by itself where its limit differs."""
    groups: dict[tuple[int, bool], list[Cell]] = {}
    for cell in cells:
        num_sms, batch = cell["num_sms"], cell["case"]["batch"]
        if limit_of(num_sms, batch) is not None:
            groups.setdefault((num_sms, batch == 1 and num_sms in SINGLE_LIMIT), []).append(cell)
    rows = {}
    for (num_sms, single), found in sorted(groups.items()):
        name = f"decode_over_floor_{num_sms}_sms{'_batch_1' if single else ''}"
        limit = limit_of(num_sms, found[0]["case"]["batch"])
        rows[name] = _worst(found, lambda c: c["over_floor"], limit)
    return rows


def _step_rows(cells: Sequence[Cell]) -> dict[str, Row]:
    """The worst step among budgets two SMs apart: its time over the fastest on fewer SMs, and over
    the mean of its neighbours."""
    series: dict[tuple[str, int], dict[int, Cell]] = {}
    for cell in cells:
        case = cell["case"]
        series.setdefault((case["model"], case["batch"]), {})[cell["num_sms"]] = cell
    slower, above = {}, {}
    for steps in series.values():
        for num_sms, cell in steps.items():
            fewer, more = steps.get(num_sms - 2), steps.get(num_sms + 2)
            if fewer:
                least = min(c["us"] for n, c in steps.items() if n < num_sms)
                slower[id(cell)] = cell["us"] / least
            if fewer and more:
                above[id(cell)] = 2 * cell["us"] / (fewer["us"] + more["us"])
    return {
        "decode_over_fewer_sms": _worst(cells, lambda c: slower.get(id(c)), SLOWER_STEP),
        "decode_over_neighbours": _worst(cells, lambda c: above.get(id(c)), ABOVE_LINE),
    }


def _prefill_rows(cells: Sequence[Cell]) -> dict[str, Row]:
    return {
        "prefill_of_gemm_rate": _worst(cells, lambda c: c.get("of_gemm"), GEMM_SHARE, least=True),
        "prefill_per_sm_of_chip": _worst(
            cells, lambda c: c.get("of_chip"), PER_SM_SHARE, least=True
        ),
    }


def _beside_row(cells: Sequence[Cell]) -> Row:
    """How much slower a step is beside a prefill; for information."""
    alone = {_key(c): c for c in cells if is_plain(c)}
    pairs = [(c, alone[_key(c)]) for c in cells if c["case"].get("beside") and _key(c) in alone]
    ratios = [slow["us"] / fast["us"] for slow, fast in pairs]
    worst = max(ratios, default=None)
    return {"value": rounded(geomean(ratios)), "worst": rounded(worst), "cells": len(ratios)}


def _overlap_row(cells: Sequence[Cell]) -> Row:
    """Time without overlap over time with it, alone; for information."""
    alone = [c for c in cells if not c["case"].get("beside")]
    plain = {_key(c): c for c in alone if is_plain(c)}
    pairs = [(c, plain[_key(c)]) for c in alone if not is_plain(c) and _key(c) in plain]
    gains = [off["us"] / on["us"] for off, on in pairs]
    return {
        "value": rounded(geomean(gains)),
        "cells": len(gains),
        "gains": [_name(c) | {"gain": rounded(g)} for (c, _), g in zip(pairs, gains, strict=True)],
    }


def _key(cell: Cell) -> tuple[str, int, int]:
    case = cell["case"]
    return case["model"], case["batch"], cell["num_sms"]


def _worst(
    cells: Iterable[Cell],
    value: Callable[[Cell], float | None],
    target: float | None,
    *,
    least: bool = False,
) -> Row:
    """The largest value against the most that is allowed, or with `least` the other way."""
    return worst_row(cells, value, target, _name, at_most=not least, shown=4)


def _name(cell: Cell) -> dict[str, Any]:
    case = cell["case"]
    sizes = ("model", "batch", "context", "tokens", "beside", "kernel")
    named = {name: case[name] for name in sizes if case.get(name) is not None}
    return {"op": cell["op"], **named, "num_sms": cell["num_sms"]}
