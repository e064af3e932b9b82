"""Curves over SMs from the cells of a ceilings file, and the device profile made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from smkern.device import DeviceInfo
from smkern.profile import Placement, Profile

Cell = Mapping[str, Any]
Points = dict[int, float]

PLACEMENTS: tuple[Placement, ...] = ("spread", "default")
PROVENANCE = ("gpu", "driver", "torch", "triton", "date", "command", "smkern_commit")


def curve(cells: Iterable[Cell], op: str, placement: str | None, *, beside: bool) -> Points:
    """SMs to the best rate measured: TB/s of `read` and `read_l2`, TFLOP/s of `dense`.

    Args:
        cells: cells of a ceilings file.
        op: "read", "read_l2" or "dense".
        placement: "spread" or "default"; None takes the better. The whole device, which has no
            placement, belongs to every curve of work alone.
        beside: with a neighbour on the complement, or alone.
    """
    points: Points = {}
    for cell in _of(cells, op, beside):
        if placement is None or cell["placement"] in (None, placement):
            n = cell["num_sms"]
            points[n] = max(points.get(n, 0.0), _rate(cell))
    return dict(sorted(points.items()))


def _of(cells: Iterable[Cell], op: str, beside: bool) -> Iterator[Cell]:
    for cell in cells:
        if cell["op"] == op and (cell["case"]["beside"] is not None) == beside:
            yield cell


def _rate(cell: Cell) -> float:
    return float(cell["tflops"] if cell["op"] == "dense" else cell["tbps"])


def dense_ceiling(cells: Iterable[Cell], info: DeviceInfo) -> Points:
    """SMs to the dense rate that power allows, TFLOP/s.

    What the SMs would do at the clock that they kept under the fastest product measured, each of
    them busy every cycle. Where no clock was read: the full clock's rate, but no more in all than
    was measured anywhere. Never less than was measured.
    """
    fastest: dict[int, Cell] = {}
    for cell in _of(cells, "dense", beside=False):
        n = cell["num_sms"]
        if n not in fastest or _rate(cell) > _rate(fastest[n]):
            fastest[n] = cell
    most = max(map(_rate, fastest.values()), default=0.0)
    points: Points = {}
    for n, cell in sorted(fastest.items()):
        flops_per_mhz = info.flops_per_clock * n / 1e6
        peak = flops_per_mhz * info.sm_clock_mhz
        mhz = cell.get("sm_mhz")
        allowed = flops_per_mhz * mhz if mhz else most
        points[n] = round(max(_rate(cell), min(peak, allowed)), 1)
    return points


def dense_beside(cells: Sequence[Cell], ceiling: Points) -> Points:
    """`ceiling` times what a product keeps of its rate while the complement reads."""
    alone = {_same(cell): _rate(cell) for cell in _of(cells, "dense", beside=False)}
    kept: dict[int, list[float]] = {}
    for cell in _of(cells, "dense", beside=True):
        if (before := alone.get(_same(cell))) is not None:
            kept.setdefault(cell["num_sms"], []).append(_rate(cell) / before)
    return {
        n: round(ceiling[n] * min(1.0, sum(shares) / len(shares)), 1)
        for n, shares in sorted(kept.items())
        if n in ceiling
    }


def _same(cell: Cell) -> tuple[Any, ...]:
    return cell["num_sms"], cell["placement"], cell["provider"]


def profile_of(cells: Sequence[Cell], info: DeviceInfo, meta: Mapping[str, Any]) -> Profile:
    """The device profile that a whole ceilings suite measured."""
    curves: dict[str, Points] = {}
    for placement in PLACEMENTS:
        for when, beside in (("alone", False), ("beside", True)):
            points = curve(cells, "read", placement, beside=beside)
            curves[f"bandwidth_tbps_{placement}_{when}"] = points
    ceiling = dense_ceiling(cells, info)
    curves["flops_tflops_spread_alone"] = ceiling
    curves["flops_tflops_spread_beside"] = dense_beside(cells, ceiling)
    return Profile(
        info,
        {name: tuple(points.items()) for name, points in curves.items() if points},
        {name: str(meta[name]) for name in PROVENANCE if meta.get(name)},
    )


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """The curves: TB/s and TFLOP/s over SMs, and the clock of SMs beside products."""
    found: dict[str, Any] = {}
    for op, unit in (("read", "tbps"), ("read_l2", "tbps"), ("dense", "tflops")):
        for placement in PLACEMENTS:
            for beside in (False, True):
                name = f"{op}_{unit}_{placement}_{'beside' if beside else 'alone'}"
                points = curve(cells, op, placement, beside=beside)
                found[name] = {str(n): value for n, value in points.items()}
    for placement in PLACEMENTS:
        reads = [cell for cell in _of(cells, "read", True) if cell["placement"] == placement]
        found[f"sm_mhz_{placement}_beside"] = {str(c["num_sms"]): c["sm_mhz"] for c in reads}
    return found
