"""The tables of `cutlass.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from smkern.bench.cutlass import Groups, groups_of, over_cublas, over_triton
from smkern.bench.cutlass_cpp import PROVIDER
from smkern.bench.rows import Cell, geomean, grouped
from smkern.bench.tables.markdown import pivot

Ratio = Callable[[dict[str, Cell]], float | None]


def ratios_table(cells: Iterable[Cell]) -> str:
    """Speed over our Triton and Gluon kernels, and over cuBLAS: geomeans over the shapes."""
    return _table(groups_of(cells), over_triton, over_cublas)


def cpp_table(cells: Iterable[Cell]) -> str:
    """The C++ kernels' speed over what dispatch takes, over cuBLAS, and with clusters over without:
    geomeans over the shapes."""

    def over_dispatched(group: dict[str, Cell]) -> float:
        return float(group["smkern"]["us"] / group[PROVIDER]["us"])

    def over_peer(group: dict[str, Cell]) -> float | None:
        return over_cublas(group, PROVIDER)

    def over_none(group: dict[str, Cell]) -> float | None:
        return group[PROVIDER]["clusters_over_none"]

    groups = [group for group in groups_of(cells) if PROVIDER in group]
    return _table(groups, over_dispatched, over_peer, over_none)


def _table(groups: Groups, *ratios: Ratio) -> str:
    """Rows and SMs, and in a field the geomean of each ratio, without the groups that lack it."""
    found = grouped(groups, lambda one: (one["smkern"]["case"]["m"], one["smkern"]["num_sms"]))
    entries = []
    for (m, num_sms), members in sorted(found.items()):
        means = [
            geomean(value for group in members if (value := ratio(group)) is not None)
            for ratio in ratios
        ]
        text = " / ".join("-" if mean is None else f"{mean:.2f}" for mean in means)
        entries.append((str(m), num_sms, text))
    return pivot("M \\ SMs", entries)
