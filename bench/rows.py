"""Rows of a summary: the figure that counts, its target, whether it is met, of how many cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import geometric_mean
from typing import Any, TypeVar

Cell = dict[str, Any]
Row = dict[str, Any]
K = TypeVar("K")
T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by what they have in common, in the order in which it comes first."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None without values."""
    found = [*values]
    return geometric_mean(found) if found else None


def target_row(
    value: float | None, target: float | None, cells: int, *, at_most: bool = False
) -> Row:
    """`met` when the value reaches the target, or with `at_most` stays within it.

    A row with no cells has a value of None and is neither met nor missed.
    """
    met = None
    if value is not None and target is not None:
        met = value <= target if at_most else value >= target
    return {"value": rounded(value), "target": target, "met": met, "cells": cells}


def worst_row(
    cells: Iterable[Cell],
    value: Callable[[Cell], float | None],
    target: float | None,
    name: Callable[[Cell], dict[str, Any]],
    *,
    at_most: bool = False,
    shown: int = 5,
) -> Row:
    """The worst cell counts: the least value, or with `at_most` the largest; `shown` are named.

    Cells that `value` has None of are left out.
    """
    found = [(figure, cell) for cell in cells if (figure := value(cell)) is not None]
    found.sort(key=lambda pair: pair[0], reverse=at_most)
    row = target_row(found[0][0] if found else None, target, len(found), at_most=at_most)
    worst = [name(cell) | {"value": rounded(figure)} for figure, cell in found[:shown]]
    return row | {"worst": worst}


def not_measured(
    cells: Iterable[Cell], name: Callable[[Cell], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The cells that failed, and why."""
    return [name(cell) | {"error": cell["error"]} for cell in cells if cell.get("error")]


def cost_cell(
    op: str,
    name: str,
    value: float,
    unit: str,
    target: float | None = None,
    *,
    provider: str = "smkern",
    **case: Any,
) -> Cell:
    """A cell of one figure; `target` is the most it may be."""
    cell: Cell = {"op": op, "case": {"name": name, **case}, "provider": provider}
    cell |= {"value": round(value, 3), "unit": unit}
    return cell if target is None else cell | {"target": target, "met": value <= target}


def settled(cell: Cell, ratio: str = "vs_best") -> float:
    """The ratio that counts: of the second measurement where there is one."""
    return float(cell.get(f"{ratio}_again") or cell[ratio])


def loses_to_best(cell: Cell) -> bool:
    """Whether a cell of ours, as dispatched, is slower than the best peer."""
    return cell["provider"] == "smkern" and (cell.get("vs_best") or 1.0) < 1.0


def has_cell(cells: Iterable[Cell], provider: str, case: Mapping[str, Any]) -> bool:
    """Whether a provider's cell with such a case was measured, without an error."""
    return any(
        cell["provider"] == provider
        and case.items() <= cell["case"].items()
        and not cell.get("error")
        for cell in cells
    )


def rows_in(summary: Any, path: str = "") -> Iterator[tuple[str, Row]]:
    """The rows of a summary by their path in it."""
    if isinstance(summary, dict):
        if "value" in summary:
            yield path, summary
            return
        for name, part in summary.items():
            yield from rows_in(part, f"{path} {name}".strip())


def geomean_row(
    values: Iterable[float], target: float | None = None, *, at_most: bool = False
) -> Row:
    """The geomean against its target, and the worst and best: the least and the largest, or with
    `at_most` the other way round."""
    found = sorted(values, reverse=at_most)
    ends = {"worst": round(found[0], 4), "best": round(found[-1], 4)} if found else {}
    return target_row(geomean(found), target, len(found), at_most=at_most) | ends
