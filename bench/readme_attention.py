"""The README's blocks about attention, from the cells of `attention.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smkern.bench.attention.rows import settled
from smkern.bench.markdown import NOT_MEASURED, markdown_table

Cell = dict[str, Any]

LABELS = {
    "smkern": "smkern",
    "flashinfer:fa2": "FlashInfer FA2",
    "flashinfer:cuda-cores": "FlashInfer, CUDA cores",
    "flashinfer:fa3": "FlashInfer FA3",
    "flashinfer:fa2-one-launch": "FlashInfer FA2, one launch",
    "sdpa:cudnn": "cuDNN, no pages",
    "sdpa:flash": "torch flash, no pages",
}
PLAIN_CASES = ("decode-8x1024",)
"""Cases told in microseconds: a rate would say little."""


def rates_table(cells: Iterable[Cell], kind: str) -> str:
    """One row a case and provider, one column a budget; TB/s, TFLOP/s, or us where so marked.

    A peer counts by the better of its partitions. `kind`: "decode", or "prefill" with mixed steps.
    """
    wanted = [
        cell
        for cell in cells
        if cell["op"] == "paged_attention"
        and cell.get("us")
        and cell["provider"] in LABELS
        and (cell["case"]["kind"] == "decode") == (kind == "decode")
    ]
    if not wanted:
        return NOT_MEASURED
    budgets = sorted({cell["group_sms"] for cell in wanted})
    names = dict.fromkeys(cell["case"]["name"] for cell in wanted)
    rows = []
    for name in names:
        for provider, label in LABELS.items():
            members = [c for c in wanted if c["case"]["name"] == name and c["provider"] == provider]
            if members:
                fastest = _fastest(members)
                shown = (_figure(fastest.get(budget), kind) for budget in budgets)
                rows.append([f"{name}{_unit(name)}, {label}", *shown])
    head = "TB/s" if kind == "decode" else "TFLOP/s"
    return markdown_table([f"{head} \\ SMs", *map(str, budgets)], rows)


def ratios_table(cells: Iterable[Cell]) -> str:
    """smkern's speed over the best of FlashInfer's ways: rows of cases, columns of budgets."""
    ours = [
        cell
        for cell in cells
        if cell["op"] == "paged_attention"
        and cell["provider"] == "smkern"
        and cell.get("vs_flashinfer")
    ]
    if not ours:
        return NOT_MEASURED
    budgets = sorted({cell["group_sms"] for cell in ours})
    found: dict[str, dict[int, float]] = {}
    for cell in ours:
        found.setdefault(cell["case"]["name"], {})[cell["group_sms"]] = settled(cell)
    rows = [
        [name, *(f"{ratios[b]:.2f}" if b in ratios else "" for b in budgets)]
        for name, ratios in found.items()
    ]
    return markdown_table(["case \\ SMs", *map(str, budgets)], rows)


def plan_table(cells: Iterable[Cell]) -> str:
    """Microseconds of the plan on the device: rows of cases, columns of budgets."""
    plans = [cell for cell in cells if cell["op"] == "plan_attention" and cell.get("us")]
    if not plans:
        return NOT_MEASURED
    budgets = sorted({cell["group_sms"] for cell in plans})
    found: dict[str, dict[int, float]] = {}
    for cell in plans:
        found.setdefault(cell["case"]["name"], {})[cell["group_sms"]] = cell["us"]
    rows = [
        [name, *(f"{us[b]:.1f}" if b in us else "" for b in budgets)] for name, us in found.items()
    ]
    return markdown_table(["plan, us \\ SMs", *map(str, budgets)], rows)


def _fastest(members: Sequence[Cell]) -> Mapping[int, Cell]:
    found: dict[int, Cell] = {}
    for cell in members:
        rival = found.get(cell["group_sms"])
        if rival is None or cell["us"] < rival["us"]:
            found[cell["group_sms"]] = cell
    return found


def _unit(name: str) -> str:
    return " (us)" if name in PLAIN_CASES else ""


def _figure(cell: Cell | None, kind: str) -> str:
    if cell is None:
        return ""
    if cell["case"]["name"] in PLAIN_CASES:
        return f"{cell['us']:.1f}"
    return f"{cell['tbps']:.2f}" if kind == "decode" else f"{cell['tflops']:.0f}"
