"""Where cells are measured: a partition of each budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
import torch

from smkern.device import Budget, Confinement, DeviceInfo, device_info
from smkern.measure.partitions import Partitions, Place, release_library_workspaces, side_for
from smkern.partition.plan import plan_ladder


@contextmanager
def opened(budgets: Iterable[int], confined: Iterable[Confinement]) -> Iterator[list[Place]]:
    """The places of these budgets; what exceeds the device is all of it.

    `confined` is `mask` for green partitions, `grid` for budgets that the grid alone keeps. Budgets
    that the device has no partition of are named.
    """
    total = device_info().num_sms
    counts = _within(budgets, total)
    parts = {n for n in counts if n < total} if "mask" in confined else set()
    with Partitions(parts, ("spread",)) as partitions:
        found = [partitions.full] if total in counts else []
        if "grid" in confined:
            grids = (Budget(n, "grid", True) for n in counts if n < total)
            found += [Place(budget, partitions.full.stream) for budget in grids]
        missing = []
        for n in sorted(parts):
            place = partitions.at(n)
            if place is None:
                missing.append(n)
            else:
                found.append(place)
        if missing:
            click.echo(f"no partition of {missing} SMs on this device: left out")
        yield found


def absent_places(
    budgets: Iterable[int], confined: Iterable[Confinement], info: DeviceInfo
) -> list[Place]:
    """Those of `opened` of a device that is not there, to say what would be measured."""
    total = info.num_sms
    counts = _within(budgets, total)
    found = [_absent(n, total) for n in counts if n == total]
    if "grid" in confined:
        found += [Place(Budget(n, "grid", True), None) for n in counts if n < total]
    if "mask" in confined:
        found += [_absent(n, total) for n in counts if side_for(n, info, "spread") is not None]
    return found


def _absent(num_sms: int, total: int) -> Place:
    """A partition that is not there; clusters can launch on the larger side of a split."""
    return Place(Budget(num_sms, "mask", num_sms > total // 2), None)


def _within(budgets: Iterable[int], total: int) -> list[int]:
    return sorted({min(n, total) for n in budgets})


@dataclass(frozen=True, slots=True)
class Sides:
    """The places of a server: both sides of the splits that it moves between, and all SMs."""

    decode: tuple[Place, ...]
    prefill: tuple[Place, ...]
    whole: Place

    def only(self, counts: Iterable[int] | None) -> Sides:
        """The places with these SM counts; None: all. The whole device stays."""
        if counts is None:
            return self
        kept = set(counts)
        decode, prefill = (
            tuple(place for place in places if place.budget.num_sms in kept)
            for places in (self.decode, self.prefill)
        )
        return Sides(decode, prefill, self.whole)


@contextmanager
def ladder_sides() -> Iterator[Sides]:
    """The places of `smkern.ladder()`, which are gone afterwards."""
    from smkern.partition import ladder

    total = device_info().num_sms
    whole = Place(Budget(total, "mask", True), torch.cuda.Stream())

    with ladder() as made:
        try:
            sides = zip(*((split.decode, split.prefill) for split in made), strict=True)
            decode, prefill = (
                tuple(Place(own.budget, own.stream, "spread", own) for own in side)
                for side in sides
            )
            yield Sides(decode, prefill, whole)
        finally:
            torch.cuda.synchronize()
            release_library_workspaces()


def absent_sides(info: DeviceInfo) -> Sides:
    """The same of a device that is not there, to say what would be measured."""
    total, rungs = info.num_sms, plan_ladder(info).rungs
    decode = tuple(_absent(n, total) for n in rungs)
    prefill = tuple(_absent(total - n, total) for n in rungs)
    return Sides(decode, prefill, _absent(total, total))
