"""Read bandwidth of several choices of SMs in interleaved rounds, one of them busy at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

import torch

from smkern.bench.contexts import Green
from smkern.bench.reader import SHAPES, Reader
from smkern.measure.timing import Timing, first_line

ROUNDS = 7
READS = 2
"""Timed reads a round, after one untimed that lets the host get ahead of the device."""


def time_reads(
    reader: Reader,
    places: Mapping[str, Green],
    *,
    rounds: int = ROUNDS,
    errors: MutableMapping[str, str] | None = None,
) -> dict[str, Timing]:
    """Time reads of the whole buffer from each place, by turns; us a read, a figure a round.

    Args:
        places: name to the SMs and the stream.
        errors: where given, a place that fails is named there and left out.
    """
    found: dict[str, list[float]] = {}
    for round_index in range(rounds + 1):
        for name, place in places.items():
            if errors is not None and name in errors:
                continue
            try:
                us = read_us(reader, place)
            except Exception as error:
                if errors is None:
                    raise
                errors[name] = first_line(error)
                found.pop(name, None)
                continue
            if round_index:
                found.setdefault(name, []).append(us)
    return {name: Timing(tuple(us_all)) for name, us_all in found.items()}


def read_us(reader: Reader, place: Green) -> float:
    """Microseconds a read, with nothing else on the device."""
    torch.cuda.synchronize(reader.device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    raw = place.stream.cuda_stream
    reader.launch(place.num_sms, raw)
    begin.record(place.stream)
    for _ in range(READS):
        reader.launch(place.num_sms, raw)
    end.record(place.stream)
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / READS


def best_reader(
    places: Iterable[Green], data: Any = None, *, among: Collection[str | None] = ()
) -> Reader:
    """The reader that is fastest over the places, by the product of its times.

    On many SMs all of them saturate the memory: give it small places.

    Args:
        data: the buffer to read; made where not given.
        among: names to choose from, such as a resumed file has; all where none is a reader's.
    """
    readers: dict[str, Reader] = {}
    for shape in [shape for shape in SHAPES if shape.name in among] or SHAPES:
        readers[shape.name] = Reader(shape=shape, data=data)
        data = readers[shape.name].data
    return readers[pick_shape(readers, {str(place.num_sms): place for place in places})]


def pick_shape(readers: Mapping[str, Reader], places: Mapping[str, Green]) -> str:
    """The name of the reader that is fastest over the places, by the product of its times."""
    scores: dict[str, float] = {}
    for name, reader in readers.items():
        scores[name] = 1.0
        for timing in time_reads(reader, places, rounds=3).values():
            scores[name] *= timing.us_median
    return min(scores, key=lambda name: scores[name])
