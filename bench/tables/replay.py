"""Tables of replays: `replay.json`."""

from __future__ import annotations

from collections.abc import Sequence

from smkern.bench.replay.ablations import ABLATIONS, said
from smkern.bench.replay.cases import beyond_table
from smkern.bench.replay.measure import BOUND
from smkern.bench.replay.oracle import ORACLE
from smkern.bench.replay.rows import (
    CHUNKED,
    FIGURE_NAMES,
    OURS,
    best,
    confirming,
    errors,
    goodputs,
    pairs,
    rivals,
)
from smkern.bench.replay.stock import ON_STOCK
from smkern.bench.results import cell_key
from smkern.bench.rows import Cell
from smkern.bench.tables.markdown import rows_or_none
from smkern.policies import POLICIES


def goodput_table(cells: Sequence[Cell]) -> str:
    """Requests/s within the limits, each policy in its best order; a row a trace and limit."""
    found = goodputs(cells)
    bounds: dict[tuple[str, str], float] = {}
    for cell in cells:
        if cell["provider"] == BOUND:
            place = cell["case"]["model"], cell["case"]["trace"]
            bounds[place] = max(bounds.get(place, 0.0), cell["goodput_rps"])
    names = [name for name in POLICIES if any(name in policies for policies in found.values())]
    rows = []
    for (model, trace, limit), policies in found.items():
        row = [f"{model}, {trace}, {limit:g} ms"]
        for name in names:
            row.append(_best(policies[name]) if name in policies else "")
        bound = bounds.get((model, trace))
        others = [cell["goodput_rps"] for cell in rivals(policies)]
        row += ["" if bound is None else f"{bound:.2f}", _ratio(policies.get(OURS), others)]
        rows.append(row)
    head = ["requests/s (order)", *names, "decode free", f"{OURS} / best other"]
    return rows_or_none(head, rows)


def orders_table(cells: Sequence[Cell]) -> str:
    """Our policy over chunking in the same order, and a greedy oracle over it in its own; a row a
    trace and limit, a column an order."""
    found = goodputs(cells)
    orders = list(
        dict.fromkeys(o for policies in found.values() for x in policies.values() for o in x)
    )
    rows = []
    for (model, trace, limit), policies in found.items():
        ours, chunked = policies.get(OURS, {}), policies.get(CHUNKED, {})
        if ours.keys() & chunked.keys():
            row = [f"{model}, {trace}, {limit:g} ms"]
            for order in orders:
                both = (ours.get(order), chunked.get(order))
                row.append(_over(*both))
            oracle = policies.get(ORACLE, {})
            row += [_over(cell, chunked.get(order)) for order, cell in oracle.items()] or [""]
            rows.append(row)
    return rows_or_none([f"{OURS} / {CHUNKED}", *orders, f"{ORACLE} / {CHUNKED}"], rows)


def kernels_table(cells: Sequence[Cell]) -> str:
    """Stock kernels and ours, chunks and our policy, order by order: where a gain comes from."""
    rows = []
    for (model, trace, limit), policies in goodputs(cells).items():
        if not policies.keys() >= set(ON_STOCK):
            continue
        for order in policies[ON_STOCK[0]]:
            row = [f"{model}, {trace}, {limit:g} ms, {order}"]
            for name in (*ON_STOCK, CHUNKED, OURS):
                cell = policies.get(name, {}).get(order)
                row.append("" if cell is None else f"{cell['goodput_rps']:.2f}")
            rows.append(row)
    head = ["requests/s", *(name.replace("_", " ") for name in ON_STOCK), CHUNKED, OURS]
    return rows_or_none(head, rows)


def paces_table(cells: Sequence[Cell]) -> str:
    """Simulated requests/s within the limits on chips whose launches take so many times as long as
    predicted."""
    found: dict[str, dict[float, float]] = {}
    for cell in cells:
        if beyond_table(cell) == {"pace"}:
            found.setdefault(_at(cell), {})[cell["case"]["pace"]] = cell["goodput_rps"]
    paces = sorted({pace for row in found.values() for pace in row})
    rows = [
        [name, *(f"{row[pace]:.1f}" if pace in row else "" for pace in paces)]
        for name, row in found.items()
    ]
    return rows_or_none(["requests/s at a pace of", *(f"{pace:.2f}" for pace in paces)], rows)


def real_table(cells: Sequence[Cell]) -> str:
    """Simulated over real replays of the same requests, less 1; "-": over too few to tell."""
    rows = []
    for simulated, real in pairs(cells):
        case, off = real["case"], errors(simulated, real)
        at = f"{case['model']}, {case['trace']}, {case['rate_rps']:g}/s, {case['tbt_slo_ms']:g} ms"
        shown = [f"{off[name]:+.1%}" if name in off else "-" for name in FIGURE_NAMES]
        rows.append([f"{at}, {real['provider']}", *shown])
    return rows_or_none(["simulated / real - 1", *FIGURE_NAMES], rows)


_GAPS = (("tbt_ms", "p99"), ("worst_gap_ms", "p90"))


def confirmed_table(cells: Sequence[Cell]) -> str:
    """Goodputs served on the GPU: whether the limits were kept at parts of them, the pace of the
    chip for which they were simulated, and the longest gap of nine requests in ten."""
    rows = []
    for cell in confirming(cells):
        case = cell["case"]
        pace = f"{case['pace']:.2f}" if "pace" in case else "-"
        kept = "kept" if cell["is_met"] else "not kept"
        rate = f"{cell['factor']:g} x {cell['simulated_goodput_rps']:.2f}"
        row = [_at(cell), pace, rate, kept]
        row += [f"{cell[name][part]:.1f}" for name, part in _GAPS]
        row.append(f"{cell['ttft_kept']:.2%}")
        rows.append([*row, str(cell.get("sm_mhz") or "-")])
    gaps = ["TBT p99", "longest, p90"]
    head = ["on the GPU", "pace", "requests/s", "limits", *gaps, "TTFT", "MHz"]
    return rows_or_none(head, rows)


def ablations_table(cells: Sequence[Cell]) -> str:
    """What is left out or otherwise, and the goodput over that of its question's first."""
    by_key = {cell_key(cell): cell for cell in cells}
    rows = []
    first: Cell = {}
    for ablation in ABLATIONS:
        cell = by_key.get(cell_key(ablation.cell))
        if cell is None:
            continue
        if cell["case"]["question"] != first.get("case", {}).get("question"):
            first = cell
        of = first.get("goodput_rps")
        ratio = f"{cell['goodput_rps'] / of:.2f}" if of else ""
        served = by_key.get(cell_key(ablation.served))
        real = said(served) if served else ""
        rows.append([ablation.question, ablation.variant, said(cell), ratio, real])
    head = ["Qwen3-8B, an H200", "", "simulated", "over the first", "on a GPU"]
    return rows_or_none(head, rows)


def _at(cell: Cell) -> str:
    case = cell["case"]
    at = f"{case['model']}, {case['trace']}, {case['tbt_slo_ms']:g} ms, {case['order']}"
    return f"{at}, {cell['provider']}"


def _best(by_order: dict[str, Cell]) -> str:
    cell = best(by_order)
    return f"{cell['goodput_rps']:.2f} ({cell['case']['order']})"


def _ratio(ours: dict[str, Cell] | None, others: Sequence[float]) -> str:
    most = max(others, default=0.0)
    return "" if ours is None or not most else f"{best(ours)['goodput_rps'] / most:.2f}"


def _over(ours: Cell | None, chunked: Cell | None) -> str:
    if ours is None or chunked is None or not chunked["goodput_rps"]:
        return ""
    return f"{ours['goodput_rps'] / chunked['goodput_rps']:.2f}"
