"""Curves over SMs from the cells of a ceilings file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Placement = Literal["spread", "default"]
PLACEMENTS: tuple[Placement, ...] = ("spread", "default")


def curve(
    cells: Sequence[Mapping[str, Any]], op: str, placement: str | None, *, beside: bool
) -> dict[int, float]:
    """SMs to the best rate measured: TB/s of `read`, TFLOP/s of `dense`.

    Args:
        cells: of a ceilings file.
        op: "read" or "dense".
        placement: "spread" or "default"; None takes the better. The whole device, which has no
            placement, belongs to every curve of work alone.
        beside: with a neighbour on the complement, or alone.
    """
    rate = "tbps" if op == "read" else "tflops"
    points: dict[int, float] = {}
    for cell in cells:
        if cell["op"] != op or (cell["case"]["beside"] is not None) != beside:
            continue
        if placement is not None and cell["placement"] not in (None, placement):
            continue
        n = cell["num_sms"]
        points[n] = max(points.get(n, 0.0), cell[rate])
    return dict(sorted(points.items()))


def summarize(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The curves: TB/s and TFLOP/s over SMs."""
    found: dict[str, Any] = {}
    for op, unit in (("read", "tbps"), ("dense", "tflops")):
        for placement in PLACEMENTS:
            for beside in (False, True):
                name = f"{op}_{unit}_{placement}_{'beside' if beside else 'alone'}"
                points = curve(cells, op, placement, beside=beside)
                found[name] = {str(n): value for n, value in points.items()}
    return found
