"""What partitions cost: making a ladder, its memory, a switch, asking for the SM count."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch

import smkern
from smkern.bench.contexts import Driver, Green
from smkern.bench.host_timing import host_time
from smkern.bench.reader import Reader
from smkern.bench.rows import Cell, cost_cell, has_cell
from smkern.errors import SmkernError
from smkern.measure.partitions import Placement, atom_of

OP = "partition_cost"
LADDER_MIB = 200.0
SWITCH_US = 10.0
FOREIGN_SMS = 16
SWITCH_RUNGS = (16, 32)
PLACEMENTS: tuple[Placement, ...] = ("spread", "default")


def used_mib(device: int) -> float:
    """Device memory in use, by this process and any other, MiB."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def ladder_costs(reader: Reader) -> Iterator[Cell]:
    """Time and memory of ladders of all 8-SM splits: of small groups spread, of 8-SM groups.

    To be run before any ladder is closed: the driver keeps what closed contexts gave back, so both
    ladders are held until both are measured.
    """
    with ExitStack() as held:
        for placement in PLACEMENTS:
            before = used_mib(reader.device)
            ladder, ms, about = _made(placement)
            held.enter_context(ladder)
            about["first"] = True
            yield cost_cell(OP, "ladder_creation", ms, "ms", **about)
            made = used_mib(reader.device) - before
            yield cost_cell(OP, "ladder_memory", made, "MiB", LADDER_MIB, **about)
            _use(ladder, reader)
            used = used_mib(reader.device) - before
            yield cost_cell(OP, "ladder_memory_in_use", used, "MiB", LADDER_MIB, **about)
    for placement in PLACEMENTS:
        ladder, ms, about = _made(placement)
        ladder.close()
        yield cost_cell(OP, "ladder_creation", ms, "ms", **about, first=False)


def _made(placement: Placement) -> tuple[Any, float, dict[str, Any]]:
    """A ladder of all 8-SM splits, the milliseconds it took, and which it is."""
    atom = atom_of(smkern.device_info(), placement)
    torch.cuda.synchronize()
    began = time.perf_counter()
    ladder = smkern.ladder(atom=atom, placement=placement)
    ms = 1e3 * (time.perf_counter() - began)
    return ladder, ms, {"atom": atom, "placement": placement, "splits": len(ladder.rungs)}


def _use(ladder: Any, reader: Reader) -> None:
    """Launch on every partition once: what the driver makes at first use is memory too."""
    for decode in ladder.rungs:
        split = ladder.split(decode=decode)
        for partition in (split.decode, split.prefill):
            reader.launch(partition.num_sms, partition.raw_stream)


def switch_costs() -> Iterator[Cell]:
    """Host time of entering one partition of a ladder after another."""
    with smkern.ladder(list(SWITCH_RUNGS)) as ladder:
        parts = [ladder.split(decode=n).prefill for n in SWITCH_RUNGS]

        def enter(i: int) -> None:
            with parts[i & 1]:
                pass

        us = host_time(enter, drain=False).us_median
        yield cost_cell(OP, "switch", us, "us", SWITCH_US)


def query_costs(others: Mapping[str, Green]) -> Iterator[Cell]:
    """Host time of `current_num_sms()` on a partition's stream and on others'."""
    with smkern.ladder([FOREIGN_SMS]) as ladder:
        own = ladder.split(decode=FOREIGN_SMS).decode
        for kind, place in {"own": Green(own.num_sms, own.stream), **others}.items():
            yield _query_row(kind, place)


def _query_row(kind: str, place: Green) -> Cell:
    case = {"name": "current_num_sms", "stream": kind}
    row: Cell = {"op": OP, "case": case, "provider": "smkern", "unit": "us"}
    try:
        with torch.cuda.stream(place.stream):
            answer = smkern.current_num_sms()
            us = host_time(lambda i: smkern.current_num_sms(), drain=False).us_median
    except SmkernError as error:
        return row | {"value": None, "right": False, "error": str(error)}
    return row | {"value": round(us, 3), "answer": answer, "right": answer == place.num_sms}


def has_costs(cells: Iterable[Cell]) -> bool:
    """Whether the last of the rows is there."""
    return has_cell(cells, "smkern", {"name": "current_num_sms", "stream": "foreign"})


def measure_costs(reader: Reader) -> Iterator[Cell]:
    """All rows; the ladder's first. SM counts are asked for on streams of others too."""
    whole = smkern.device_info().num_sms
    with closing(Driver().one_group(FOREIGN_SMS)) as foreign:
        others = {
            "default": Green(whole, torch.cuda.default_stream()),
            "plain": Green(whole, torch.cuda.Stream()),
            "foreign": foreign,
        }
        yield from ladder_costs(reader)
        yield from switch_costs()
        yield from query_costs(others)
