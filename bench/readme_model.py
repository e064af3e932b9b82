"""The README's blocks about whole models, from the cells of `model.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from smkern.bench.markdown import NOT_MEASURED, markdown_table
from smkern.bench.model.cases import limit_of
from smkern.bench.model.rows import DECODE, KERNEL, PREFILL, is_plain, of

Cell = dict[str, Any]


def decode_table(cells: Iterable[Cell]) -> str:
    """A decode step in ms, over its floor and its limit: rows of steps, columns of SM budgets.

    Beside a prefill: the step, and the prefill's tokens/ms on the complement.
    """
    cells = list(cells)
    steps = [c for c in of(cells, DECODE) if c.get("us")]
    if not steps:
        return NOT_MEASURED
    budgets = sorted({cell["num_sms"] for cell in steps})
    others = {_pair_key(c): c for c in of(cells, PREFILL) if c.get("us") and c["case"]["beside"]}
    rows = []
    for model, batch, context in dict.fromkeys(_step(cell) for cell in steps):
        members = [c for c in steps if _step(c) == (model, batch, context)]
        for label, wanted in _KINDS:
            found = {c["num_sms"]: c for c in members if wanted(c)}
            if found:
                shown = [_decode_figure(found.get(n), batch, others) for n in budgets]
                rows.append([f"{model} {batch} x {context}{label}", *shown])
    rows.append(["**limit**", *(_limits(n, steps) for n in budgets)])
    return markdown_table(["ms (x floor) \\ SMs", *map(str, budgets)], rows)


def _without_overlap(cell: Cell) -> bool:
    return not cell["case"]["beside"] and not cell["case"]["overlap"]


def _beside(cell: Cell) -> bool:
    return bool(cell["case"]["beside"]) and cell["case"]["overlap"]


_KINDS = (
    (", alone", is_plain),
    (", no overlap", _without_overlap),
    (", beside a prefill", _beside),
)


def _step(cell: Cell) -> tuple[str, int, int]:
    case = cell["case"]
    return case["model"], case["batch"], case["context"]


def _pair_key(cell: Cell) -> tuple[str, str, int]:
    """Of a prefill: its model, what ran beside it, and on how many SMs that was."""
    return cell["case"]["model"], cell["case"]["beside"], cell["beside_sms"]


def _decode_figure(cell: Cell | None, batch: int, others: dict[tuple[str, str, int], Cell]) -> str:
    if cell is None:
        return ""
    limit = limit_of(cell["num_sms"], batch)
    over, shown = cell["over_floor"], f"{cell['us'] / 1e3:.2f}"
    mark = "**" if is_plain(cell) and limit is not None and over > limit else ""
    text = f"{shown} ({mark}{over:.2f}{mark})"
    case = cell["case"]
    other = others.get((case["model"], f"decode {batch}x{case['context']}", cell["num_sms"]))
    if case["beside"] and other is not None:
        text += f" + {other['tokens_per_ms']:.1f}/ms"
    return text


def _limits(num_sms: int, steps: Sequence[Cell]) -> str:
    limits = dict.fromkeys(
        limit_of(num_sms, c["case"]["batch"]) for c in steps if c["num_sms"] == num_sms
    )
    shown = sorted(limit for limit in limits if limit is not None)
    return " or ".join(f"{limit:.2f}" for limit in shown)


def prefill_table(cells: Iterable[Cell]) -> str:
    """Rates of a prefill alone: rows of models and figures, columns of SM budgets."""
    passes = [c for c in of(cells, PREFILL) if c.get("us") and is_plain(c)]
    if not passes:
        return NOT_MEASURED
    budgets = sorted({cell["num_sms"] for cell in passes})
    figures = (
        ("TFLOP/s", "tflops", ".0f"),
        ("TFLOP/s an SM", "tflops_per_sm", ".2f"),
        ("of the chip's an SM", "of_chip", ".2f"),
        ("of our GEMM's rate", "of_gemm", ".2f"),
        ("tokens/ms", "tokens_per_ms", ".1f"),
    )
    rows = []
    for model, tokens in dict.fromkeys((c["case"]["model"], c["case"]["tokens"]) for c in passes):
        members = [
            c for c in passes if (c["case"]["model"], c["case"]["tokens"]) == (model, tokens)
        ]
        by = {cell["num_sms"]: cell for cell in members}
        for label, name, style in figures:
            shown = [format(by[n][name], style) if by.get(n, {}).get(name) else "" for n in budgets]
            rows.append([f"{model} 1 x {tokens}, {label}", *shown])
    return markdown_table(["prefill \\ SMs", *map(str, budgets)], rows)


def breakdown_table(cells: Iterable[Cell]) -> str:
    """A decode step's operators: us a launch and times their floor, by SM budget.

    One table a model and batch; the last row is the sum over the step's launches in ms.
    """
    kernels = [c for c in of(cells, KERNEL) if c.get("us")]
    parts = []
    for step in dict.fromkeys(_step(cell) for cell in kernels):
        members = [cell for cell in kernels if _step(cell) == step]
        model, batch, context = step
        parts.append(f"{model}, {batch} x {context}:\n\n{_breakdown(members)}")
    return "\n\n".join(parts) or NOT_MEASURED


def _breakdown(members: Sequence[Cell]) -> str:
    budgets = sorted({cell["num_sms"] for cell in members})
    by = {(c["case"]["kernel"], c["num_sms"]): c for c in members}
    names = dict.fromkeys(cell["case"]["kernel"] for cell in members)
    rows = [
        [_counted(name, members), *(_kernel(by.get((name, n))) for n in budgets)] for name in names
    ]
    sums = {n: sum(c["us"] * c["count"] for c in members if c["num_sms"] == n) for n in budgets}
    rows.append(["**sum, ms**", *(f"{sums[n] / 1e3:.2f}" for n in budgets)])
    return markdown_table(["us (x floor) \\ SMs", *map(str, budgets)], rows)


def _counted(name: str, members: Sequence[Cell]) -> str:
    count = next(c["count"] for c in members if c["case"]["kernel"] == name)
    return f"{name} x {count}" if count > 1 else name


def _kernel(cell: Cell | None) -> str:
    if cell is None:
        return ""
    over = f" ({cell['us'] / cell['floor_us']:.2f})" if cell["floor_us"] >= 0.5 else ""
    return f"{cell['us']:.1f}{over}"
