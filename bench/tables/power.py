"""The table of `power.json`."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.bench.prompt_power_rows import cooler, groups_of
from smkern.bench.rows import Cell
from smkern.bench.tables.markdown import rows_or_none

HEAD = ("product, SMs", "configuration", "us", "mJ a token", "W", "MHz", "decode, ms")


def configurations_table(cells: Iterable[Cell]) -> str:
    """Of each product and budget, beside decode: the fastest, the coolest of those as fast, and
    what dispatch takes."""
    rows = []
    for group in groups_of(cells):
        dispatched = [cell for cell in group if cell["dispatched"]]
        named: dict[str, tuple[list[str], Cell]] = {}
        for name, cell in (
            ("fastest", group[0]),
            ("coolest", cooler(group)),
            *(("dispatched", cell) for cell in dispatched),
        ):
            named.setdefault(cell["case"]["config"], ([], cell))[0].append(name)
        for names, cell in named.values():
            rows.append([_product(cell), f"{', '.join(names)}: {_config(cell)}", *_figures(cell)])
    return rows_or_none(HEAD, rows)


def _product(cell: Cell) -> str:
    case = cell["case"]
    epilogue = "" if case["epilogue"] == "none" else f" {case['epilogue']}"
    return f"{case['m']}x{case['n']}x{case['k']}{epilogue}, {cell['num_sms']}"


def _config(cell: Cell) -> str:
    return f"`{cell['case']['config']}`"


def _figures(cell: Cell) -> list[str]:
    return [
        f"{cell['us']:.0f}",
        *(_shown(cell, name, digits) for name, digits in (("mj_per_token", 4), ("watts", 0))),
        _shown(cell, "sm_mhz", 0),
        f"{cell['decode_us'] / 1e3:.3f}",
    ]


def _shown(cell: Cell, name: str, digits: int) -> str:
    value = cell.get(name)
    return "-" if value is None else f"{value:.{digits}f}"
