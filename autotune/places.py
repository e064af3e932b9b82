"""Where cells are measured: a partition of each budget, and its complement for a neighbour."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
import torch

from smkern.device import Budget, Confinement, device_info
from smkern.measure.partitions import Partitions, Place, release_library_workspaces
from smkern.measure.timing import current_stream
from smkern.partition import Partition
from smkern.partition.plan import DEFAULT_STEP

_NEIGHBOUR_BYTES = 256 << 20
_COPIES_A_GRAPH = 16
_GRAPHS_IN_FLIGHT = 3


@contextmanager
def opened(
    budgets: Iterable[int], confined: Iterable[Confinement], *, contended: bool
) -> Iterator[list[Place]]:
    """The places of these budgets, `contended` only those with room for a neighbour.

    `confined` is `mask` for green partitions, `grid` for budgets that the grid alone keeps. Budgets
    that the device has no partition of are named.
    """
    total = device_info().num_sms
    counts = sorted({min(n, total) for n in budgets})
    parts = {n for n in counts if n < total} if "mask" in confined else set()
    with Partitions(parts | {total - n for n in parts}, ("spread",)) as partitions:
        found = [partitions.full] if total in counts else []
        if "grid" in confined:
            grids = (Budget(n, "grid", True) for n in counts if n < total)
            found += [Place(budget, partitions.full.stream) for budget in grids]
        missing = []
        for n in sorted(parts):
            place, other = partitions.at(n), partitions.at(total - n)
            beside = None if other is None or other is place else other.stream
            if place is None:
                missing.append(n)
            else:
                found.append(replace(place, neighbour_stream=beside))
        if missing:
            click.echo(f"no partition of {missing} SMs on this device: left out")
        yield [x for x in found if x.neighbour_stream is not None or not contended]


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

    def beside(own: Partition, other: Partition) -> Place:
        return Place(own.budget, own.stream, "spread", own, other.stream)

    with ladder() as made:
        try:
            splits = list(made)
            yield Sides(
                tuple(beside(split.decode, split.prefill) for split in splits),
                tuple(beside(split.prefill, split.decode) for split in splits),
                whole,
            )
        finally:
            torch.cuda.synchronize()
            release_library_workspaces()


def absent_sides(total: int) -> Sides:
    """The same of a device that is not there, to say what would be measured."""
    rungs = range(DEFAULT_STEP, total - DEFAULT_STEP + 1, DEFAULT_STEP)

    def place(num_sms: int) -> Place:
        return Place(Budget(num_sms, "mask", num_sms > total // 2), None)

    return Sides(
        tuple(place(n) for n in rungs), tuple(place(total - n) for n in rungs), place(total)
    )


@contextmanager
def memory_bound_neighbour(stream: Any) -> Iterator[None]:
    """Keep the partition of `stream` copying memory for as long as the context lasts.

    A thread replays a captured graph of copies, a few in flight, so the neighbour never pauses and
    ends within a millisecond or so of the context.
    """
    source = torch.empty(_NEIGHBOUR_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    with current_stream(stream):
        # an elementwise kernel, because a copy may go to a copy engine, outside the partition
        torch.bitwise_not(source, out=target)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_COPIES_A_GRAPH):
            torch.bitwise_not(source, out=target)
        graph.capture_end()
    stop = threading.Event()
    thread = threading.Thread(target=_replay_until, args=(graph, stream, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        stream.synchronize()
        torch.cuda.synchronize()
        graph.reset()


def _replay_until(graph: Any, stream: Any, stop: threading.Event) -> None:
    in_flight: list[Any] = []
    with current_stream(stream):
        while not stop.is_set():
            if len(in_flight) >= _GRAPHS_IN_FLIGHT:
                in_flight.pop(0).synchronize()
            graph.replay()
            event = torch.cuda.Event()
            event.record(stream)
            in_flight.append(event)
