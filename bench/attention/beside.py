"""Our decode attention beside prompts' products, held against a plain reader beside the same."""

from __future__ import annotations

from typing import Any

from smkern.bench.cells import our_head
from smkern.bench.contention import Load, time_beside
from smkern.bench.dense import Dense
from smkern.bench.reader import SHAPES, Reader
from smkern.measure.attention import AttentionCase
from smkern.measure.partitions import Place
from smkern.measure.sm_clock import DeviceClock
from smkern.measure.timing import Call

OP = "paged_attention_beside"
MOST_SMS = 48
"""Decode sides that multiplexing gives to decode; more SMs read what memory gives."""


def beside_cell(case: AttentionCase, call: Call, place: Place, other: Place) -> dict[str, Any]:
    """A decode step and the reader at `place`, by turns, while products run at `other`.

    Args:
        call: our attention, planned for `place`.
        place: the decode side.

    Returns:
        A cell; `fraction_of_beside_floor` is the step's bandwidth over the reader's.
    """
    reader, dense = Reader(shape=SHAPES[-1]), Dense()
    raw = place.stream.cuda_stream

    def read(i: int) -> None:
        reader.launch(place.num_sms, raw)

    probes = {name: Load.of(x, place.stream) for name, x in (("attention", call), ("read", read))}
    products = Load.of(dense.calls()["smkern"], other.stream)
    found = time_beside(probes, products, DeviceClock(place.stream))
    us = found.probes["attention"].us_median
    tbps = case.bytes_moved / us / 1e6
    reads = reader.tbps(found.probes["read"].us_median)
    return our_head(OP, case.about | {"beside": "dense"}, place) | {
        "us": round(us, 3),
        "tbps": round(tbps, 4),
        "beside_floor_us": round(case.bytes_moved / reads / 1e6, 3),
        "fraction_of_beside_floor": round(tbps / reads, 4),
        "noise": round(found.probes["attention"].noise, 4),
        "sm_mhz": found.sm_mhz,
    }
