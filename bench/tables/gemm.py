"""Tables of `gemm.json`, `cutlass.json` and `fp8.json`, and of the cost model alone:
`untuned.json`, `left_out.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from smkern.bench.cutlass import Groups, groups_of, over_cublas, over_triton
from smkern.bench.cutlass_cpp import PROVIDER
from smkern.bench.fp8_rows import times_of
from smkern.bench.gemm_rows import WORST_TARGET, compared, settled_ratio
from smkern.bench.peers import DEEPGEMM
from smkern.bench.results import Results
from smkern.bench.rows import Cell, geomean, grouped
from smkern.bench.tables.markdown import NOT_MEASURED, markdown_table, pivot, rows_or_none
from smkern.bench.untuned import ROWS, UNDER, WORST, better_ratio, by_provider

Case = tuple[int, int, int]
Ratio = Callable[[dict[str, Cell]], float | None]

RATE_CASES = ((64, 28672, 4096), (512, 6144, 4096), (2048, 6144, 4096), (2048, 4096, 14336))
WHY_CASE, WHY_BUDGETS = (2048, 4096, 14336), (72, 84, 100, 116, 132)
RATE_LABELS = {"smkern": "smkern", "cublas": "cuBLAS"}
PROVIDERS = {
    "smkern": "as dispatched", "smkern:static": "as dispatched, weights static",
    "smkern:triton": "our own kernels only",
}  # fmt: skip


def ratio_tables(cells: Sequence[Cell]) -> str:
    """Speed over cuBLAS: rows of M, columns of budgets; geomeans over the shapes."""
    parts = []
    for provider, label in PROVIDERS.items():
        found = compared(cells, provider)
        if found:
            ratios = [settled_ratio(cell) for cell in found]
            parts.append(
                f"**smkern, {label}, over cuBLAS**: geomean {geomean(ratios):.3f} over "
                f"{len(found)} cells, worst {min(ratios):.2f}\n\n{_by_budget(found)}"
            )
    return "\n\n".join(parts) or NOT_MEASURED


def _by_budget(cells: Sequence[Cell]) -> str:
    found: dict[tuple[float, int], list[float]] = {}
    for cell in cells:
        for row in (cell["case"]["m"], float("inf")):
            found.setdefault((row, cell["group_sms"]), []).append(settled_ratio(cell))
    entries = []
    for (m, budget), ratios in sorted(found.items()):
        name, mark = ("**all**", "**") if m == float("inf") else (str(m), "")
        entries.append((name, budget, f"{mark}{geomean(ratios):.2f}{mark}"))
    return pivot("M \\ SMs", entries)


def rates_table(cells: Iterable[Cell]) -> str:
    """TFLOP/s of a few cases: ours and cuBLAS in its better partition, over SM budgets."""
    return pivot("M x N x K \\ SMs", _rates(cells, RATE_CASES, "{} x {} x {}, "))


def why_table(cells: Iterable[Cell]) -> str:
    """TFLOP/s of one case at the budgets where cuBLAS falls behind."""
    entries = (entry for entry in _rates(cells, [WHY_CASE], "") if entry[1] in WHY_BUDGETS)
    return pivot("TFLOP/s \\ SMs", entries)


def _rates(
    cells: Iterable[Cell], cases: Sequence[Case], name: str
) -> Iterator[tuple[str, int, str]]:
    order = list(RATE_LABELS)
    found = []
    for cell in cells:
        case = tuple(cell["case"].get(size) for size in ("m", "n", "k"))
        if case in cases and cell["provider"] in order and cell.get("tflops"):
            place = cases.index(case), order.index(cell["provider"])
            found.append((place, cell["tflops"], cell["group_sms"]))
    for (index, provider), tflops, budget in sorted(found):
        row = name.format(*cases[index]) + RATE_LABELS[order[provider]]
        yield row, budget, f"{tflops:.0f}"


def losing_table(cells: Sequence[Cell]) -> str:
    """Every cell below its limit in either of its two measurements."""
    if not any(compared(cells, provider) for provider in PROVIDERS):
        return NOT_MEASURED
    rows = [row for provider in PROVIDERS for row in _losing_rows(compared(cells, provider))]
    head = ["M x N x K", "SMs", "by", "limit", "first", "again", "configuration"]
    return markdown_table(head, rows) if rows else "No cell loses more than its limit."


def _losing_rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for cell in sorted(cells, key=settled_ratio):
        limit, case = WORST_TARGET[cell["provider"]], cell["case"]
        again = cell.get("vs_cublas_again")
        if min(cell["vs_cublas"], settled_ratio(cell)) < limit:
            yield [
                f"{case['m']} x {case['n']} x {case['k']}",
                str(cell["group_sms"]),
                f"`{cell['provider']}`",
                f"{limit:.2f}",
                f"{cell['vs_cublas']:.3f}",
                "" if again is None else f"{again:.3f}",
                f"`{cell.get('config', '')}`",
            ]


def untuned_table(cells: Iterable[Cell]) -> str:
    """The cost model's choices over cuBLAS, by rows of `a`; beside them what dispatch takes, where
    that was measured."""
    found = [ours for ours in by_provider(cells).values() if ours]
    if not found:
        return NOT_MEASURED
    rows = []
    for m in (*ROWS, None):
        name, mean = (str(m), ".2f") if m else ("all", ".3f")
        row = [name]
        for ours in found:
            ratios = [better_ratio(cell) for cell in ours if m is None or cell["case"]["m"] == m]
            under = (str(sum(ratio < limit for ratio in ratios)) for limit in (WORST, UNDER))
            row += [f"{geomean(ratios):{mean}}", f"{min(ratios):.2f}", *under]
        rows.append([*row, str(len(ratios))])
    head = ["geomean over cuBLAS", "worst", f"under {WORST}", f"under {UNDER}"]
    again = [f"as dispatched: {head[0]}", *head[1:]] * (len(found) - 1)
    return rows_or_none(["rows", *head, *again, "cells"], rows)


def left_out_table(results: Results) -> str:
    """The committed shapes by constants fitted without them, over tuned."""
    summary = results.summary
    if "left_out_geomean" not in summary:
        return NOT_MEASURED
    mean, worst = summary["left_out_geomean"], summary["left_out_worst"]
    rows = [
        ["time over tuned, geomean", f"{mean['value']:.3f}", str(mean["target"])],
        [f"the worst of {mean['cells']} cells", f"{worst['value']:.2f}", str(worst["target"])],
        ["cells above that", str(worst["cells_over"]), "0"],
    ]
    return markdown_table(["committed shapes, each left out of the fit", "", "asked"], rows)


def cutlass_table(cells: Iterable[Cell]) -> str:
    """Speed over our Triton and Gluon kernels, and over cuBLAS: geomeans over the shapes."""
    return _ratios_of(groups_of(cells), over_triton, over_cublas)


def cutlass_cpp_table(cells: Iterable[Cell]) -> str:
    """The C++ kernels' speed over what dispatch takes, over cuBLAS, and with clusters over without:
    geomeans over the shapes."""

    def over_dispatched(group: dict[str, Cell]) -> float:
        return float(group["smkern"]["us"] / group[PROVIDER]["us"])

    def over_peer(group: dict[str, Cell]) -> float | None:
        return over_cublas(group, PROVIDER)

    def over_none(group: dict[str, Cell]) -> float | None:
        return group[PROVIDER]["clusters_over_none"]

    groups = [group for group in groups_of(cells) if PROVIDER in group]
    return _ratios_of(groups, over_dispatched, over_peer, over_none)


def _ratios_of(groups: Groups, *ratios: Ratio) -> str:
    """Rows and SMs, and in a field the geomean of each ratio, without the groups that lack it."""
    found = grouped(groups, lambda one: (one["smkern"]["case"]["m"], one["smkern"]["num_sms"]))
    entries = []
    for (m, num_sms), members in sorted(found.items()):
        means = [
            geomean(value for group in members if (value := ratio(group)) is not None)
            for ratio in ratios
        ]
        entries.append((str(m), num_sms, _joined(means)))
    return pivot("M \\ SMs", entries)


def fp8_table(cells: Iterable[Cell]) -> str:
    """Times bf16's speed and peers', geomeans over the shapes, by scales and rows over SMs."""
    cells = list(cells)
    measured = [cell for cell in cells if cell["provider"] == "smkern" and cell.get("us")]
    groups = grouped(measured, lambda cell: (_fp8_row(cell["case"]), cell["num_sms"]))
    entries = []
    for (row, num_sms), ours in groups.items():
        means = (geomean(times_of(cells, ours, peer)) for peer in ("bf16", "torch", DEEPGEMM))
        entries.append((row, num_sms, _joined(means)))
    return pivot("scales of, rows", entries)


def _fp8_row(case: dict[str, Any]) -> str:
    if "experts" in case:
        return f"{case['scales']}, experts of {case['tokens']} tokens"
    return f"{case['scales']}, {case['m']}"


def _joined(means: Iterable[float | None]) -> str:
    return " / ".join("-" if mean is None else f"{mean:.2f}" for mean in means)
