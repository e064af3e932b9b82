"""README blocks of what nobody tuned: new shapes, budgets between, a model after one command."""

from __future__ import annotations

from typing import Any

from smkern.bench.markdown import NOT_MEASURED, markdown_table
from smkern.bench.model.rows import DECODE, PREFILL
from smkern.bench.results import Results
from smkern.bench.untuned import ROWS, UNDER, WORST, better_ratio
from smkern.measure.timing import geomean

Cell = dict[str, Any]

STEPS_A_LINE = 9


def untuned_table(results: Results) -> str:
    """Ratios to cuBLAS by rows of `a`, then the summary's rows."""
    cells = [c for c in results.cells if c["provider"] == "smkern:model" and c.get("vs_cublas")]
    if not cells:
        return NOT_MEASURED
    rows = []
    for m in (*ROWS, None):
        found = [better_ratio(c) for c in cells if m is None or c["case"]["m"] == m]
        name, mean = (str(m), ".2f") if m else ("all", ".3f")
        under = (str(sum(ratio < limit for ratio in found)) for limit in (WORST, UNDER))
        figures = f"{geomean(found):{mean}}", f"{min(found):.2f}"
        rows.append([name, *figures, *under, str(len(found))])
    head = ["rows", "geomean over cuBLAS", "worst", f"under {WORST}", f"under {UNDER}", "cells"]
    return markdown_table(head, rows)


def left_out_table(results: Results) -> str:
    """The committed shapes by constants fitted without them, over tuned."""
    summary = results.summary
    if "left_out_geomean" not in summary:
        return NOT_MEASURED
    mean, worst = summary["left_out_geomean"], summary["left_out_worst"]
    over = worst["cells_over"]
    rows = [
        ["time over tuned, geomean", f"{mean['value']:.3f}", str(mean["target"])],
        [f"the worst of {mean['cells']} cells", f"{worst['value']:.2f}", str(worst["target"])],
        ["cells above that", str(over), "0"],
    ]
    return markdown_table(["committed shapes, each left out of the fit", "", "asked"], rows)


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


def autotune_table(results: Results) -> str:
    """A model after one command, over the shipped tables, which took days of measurements."""
    pairs: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in results.cells:
        if cell["op"] in (DECODE, PREFILL):
            case = cell["case"]
            key = cell["op"], case["batch"], cell["num_sms"]
            pairs.setdefault(key, {})[case["tables"]] = cell
    if not pairs:
        return NOT_MEASURED
    rows = []
    for (op, batch, num_sms), found in sorted(pairs.items()):
        command, shipped = (found[name]["us"] / 1e3 for name in ("command", "shipped"))
        what = f"decode, batch {batch}" if op == DECODE else "prompt of 8,192"
        rows.append(
            [what, str(num_sms), f"{command:.2f}", f"{shipped:.2f}", f"{command / shipped:.3f}"]
        )
    head = ["", "SMs", "ms, one command's tables", "ms, the shipped tables", "ratio"]
    return markdown_table(head, rows)
