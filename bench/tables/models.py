"""Tables of whole models: `model.json`, `steps.json` and `autotune.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from smkern.bench.model.cases import limit_of
from smkern.bench.model.rows import DECODE, KERNEL, PREFILL, is_plain, of
from smkern.bench.results import Results
from smkern.bench.rows import Cell, grouped
from smkern.bench.tables.markdown import NOT_MEASURED, markdown_table, pivot, rows_or_none

STEPS_A_LINE = 9
PREFILL_FIGURES = (
    ("TFLOP/s", "tflops", ".0f"),
    ("TFLOP/s an SM", "tflops_per_sm", ".2f"),
    ("of the chip's an SM", "of_chip", ".2f"),
    ("of our GEMM's rate", "of_gemm", ".2f"),
    ("tokens/ms", "tokens_per_ms", ".1f"),
)


def decode_table(cells: Iterable[Cell]) -> str:
    """A decode step in ms, over its floor and its limit: rows of steps, columns of SM budgets.

    Beside a prefill: the step, and the prefill's tokens/ms on the complement.
    """
    cells = list(cells)
    steps = [cell for cell in of(cells, DECODE) if cell.get("us")]
    beside = {
        (c["case"]["model"], c["case"]["beside"], c["beside_sms"]): c["tokens_per_ms"]
        for c in of(cells, PREFILL)
        if c.get("us") and c["case"]["beside"]
    }
    order = list(dict.fromkeys(_step(cell) for cell in steps))
    entries = []
    for cell in sorted(steps, key=lambda cell: (order.index(_step(cell)), _kind(cell))):
        kind, (model, batch, context) = _kind(cell), _step(cell)
        if kind < len(_KINDS):
            row = f"{model} {batch} x {context}, {_KINDS[kind]}"
            entries.append((row, cell["num_sms"], _decode_figure(cell, beside)))
    limits: dict[int, set[float]] = {cell["num_sms"]: set() for cell in steps}
    for cell in steps:
        limit = limit_of(cell["num_sms"], cell["case"]["batch"])
        limits[cell["num_sms"]] |= set() if limit is None else {limit}
    for num_sms, found in limits.items():
        entries.append(("**limit**", num_sms, " or ".join(f"{x:.2f}" for x in sorted(found))))
    return pivot("ms (x floor) \\ SMs", entries)


_KINDS = ("alone", "no overlap", "beside a prefill")


def _kind(cell: Cell) -> int:
    """A place in `_KINDS`; behind them: beside a prefill without overlap, which is not shown."""
    case = cell["case"]
    if is_plain(cell):
        return 0
    return 1 if not case["beside"] else 2 if case["overlap"] else 3


def _step(cell: Cell) -> tuple[str, int, int]:
    case = cell["case"]
    return case["model"], case["batch"], case["context"]


def _decode_figure(cell: Cell, beside: dict[tuple[str, str, int], float]) -> str:
    model, batch, context = _step(cell)
    limit, over = limit_of(cell["num_sms"], batch), cell["over_floor"]
    mark = "**" if is_plain(cell) and limit is not None and over > limit else ""
    text = f"{cell['us'] / 1e3:.2f} ({mark}{over:.2f}{mark})"
    rate = beside.get((model, f"decode {batch}x{context}", cell["num_sms"]))
    return f"{text} + {rate:.1f}/ms" if cell["case"]["beside"] and rate is not None else text


def prefill_table(cells: Iterable[Cell]) -> str:
    """Rates of a prefill alone: rows of models and figures, columns of SM budgets."""
    passes = [cell for cell in of(cells, PREFILL) if cell.get("us") and is_plain(cell)]
    entries = []
    for title, prompts in grouped(passes, _prompt).items():
        for label, name, style in PREFILL_FIGURES:
            for cell in prompts:
                text = format(cell[name], style) if cell.get(name) else ""
                entries.append((f"{title}, {label}", cell["num_sms"], text))
    return pivot("prefill \\ SMs", entries)


def _prompt(cell: Cell) -> str:
    return "{model} {batch} x {tokens}".format_map(cell["case"])


def breakdown_table(cells: Iterable[Cell]) -> str:
    """A decode step's operators: us a launch and times their floor, by SM budget.

    One table a model and batch; the last row is the sum over the step's launches in ms.
    """
    kernels = [cell for cell in of(cells, KERNEL) if cell.get("us")]
    parts = []
    for model, batch, context in dict.fromkeys(_step(cell) for cell in kernels):
        members = [cell for cell in kernels if _step(cell) == (model, batch, context)]
        parts.append(f"{model}, {batch} x {context}:\n\n{_breakdown(members)}")
    return "\n\n".join(parts) or NOT_MEASURED


def _breakdown(members: Sequence[Cell]) -> str:
    counts: dict[str, int] = {}
    sums: dict[int, float] = {}
    for cell in members:
        counts.setdefault(cell["case"]["kernel"], cell["count"])
        sums[cell["num_sms"]] = sums.get(cell["num_sms"], 0.0) + cell["us"] * cell["count"]
    entries = []
    for cell in members:
        name = cell["case"]["kernel"]
        row = f"{name} x {counts[name]}" if counts[name] > 1 else name
        over = f" ({cell['us'] / cell['floor_us']:.2f})" if cell["floor_us"] >= 0.5 else ""
        entries.append((row, cell["num_sms"], f"{cell['us']:.1f}{over}"))
    entries += (("**sum, ms**", num_sms, f"{us / 1e3:.2f}") for num_sms, us in sums.items())
    return pivot("us (x floor) \\ SMs", entries)


def steps_table(results: Results) -> str:
    """A decode step by SMs, two apart."""
    steps = sorted((c["num_sms"], c["us"] / 1e3) for c in results.cells if c["op"] == DECODE)
    if not steps:
        return NOT_MEASURED
    lines = []
    for at in range(0, len(steps), STEPS_A_LINE):
        part = steps[at : at + STEPS_A_LINE]
        head = ["SMs", *(str(num_sms) for num_sms, _ in part)]
        lines.append(markdown_table(head, [["ms", *(f"{ms:.2f}" for _, ms in part)]]))
    names = "decode_over_fewer_sms", "decode_over_neighbours"
    slower, above = (results.summary[name]["value"] for name in names)
    lines.append(
        f"At most {slower:.3f} times a step on fewer SMs, and {above:.3f} times the mean of its "
        "neighbours."
    )
    return "\n\n".join(lines)


def autotune_table(cells: Iterable[Cell]) -> str:
    """A model after one command, over the shipped tables, which took days of measurements."""
    pairs: dict[tuple[Any, ...], dict[str, float]] = {}
    for cell in cells:
        if cell["op"] in (DECODE, PREFILL):
            case = cell["case"]
            key = cell["op"], case["batch"], cell["num_sms"]
            pairs.setdefault(key, {})[case["tables"]] = cell["us"] / 1e3
    rows = []
    for (op, batch, num_sms), ms in sorted(pairs.items()):
        what = f"decode, batch {batch}" if op == DECODE else "prompt of 8,192"
        command, shipped = ms["command"], ms["shipped"]
        rows.append(
            [what, str(num_sms), f"{command:.2f}", f"{shipped:.2f}", f"{command / shipped:.3f}"]
        )
    head = ["", "SMs", "ms, one command's tables", "ms, the shipped tables", "ratio"]
    return rows_or_none(head, rows)
