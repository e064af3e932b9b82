"""Rates of two streams' work while both are busy: what each keeps beside the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from smkern.measure.timing import Timing, current_stream

WINDOW_US = 40_000.0
"""How long the streams are kept busy, unless more is asked for."""
MIN_CALLS = 6
SETTLE = 0.3
"""This share of the common time is left out at its start: clocks are still falling."""
GATE_CYCLES = 10_000_000
"""About 5 ms in which the host fills the queues."""
MAX_CALLS = 400
"""Calls in a queue; a stream takes 1,024 launches and records before it blocks the host."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work that is repeated on a stream.

    Args:
        call: enqueues one call, numbered, on the current stream, which is `stream`.
        stream: a torch stream.
        expected_us: about how long a call takes with nothing beside it.
    """

    call: Callable[[int], Any]
    stream: Any
    expected_us: float


def window_us(loads: Mapping[str, Load], at_least_us: float = WINDOW_US) -> float:
    """Microseconds to keep all streams busy: `MIN_CALLS` of the longest call at the least."""
    return max(at_least_us, MIN_CALLS * max(load.expected_us for load in loads.values()))


def calls_in(window: float, load: Load) -> int:
    return max(MIN_CALLS, min(MAX_CALLS, math.ceil(window / load.expected_us)))


def spans_inside(marks: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Durations of the calls that ran while every stream was busy, the start left out.

    Args:
        marks: stream to the times at which its calls began, and the last one's end, in order.

    Returns:
        stream to durations; empty where no call lies inside the common time.
    """
    begin = max(times[0] for times in marks.values())
    end = min(times[-1] for times in marks.values())
    begin += SETTLE * (end - begin)
    return {
        name: tuple(
            after - before for before, after in pairwise(times) if before >= begin and after <= end
        )
        for name, times in marks.items()
    }


def time_together(
    loads: Mapping[str, Load],
    *,
    at_least_us: float = WINDOW_US,
    while_busy: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Run the loads side by side, each on its stream, and time the calls that overlapped.

    One load alone is timed the same way. Each call has run eagerly before.

    Args:
        loads: name to work; one to a stream.
        at_least_us: how long to keep the streams busy.
        while_busy: called once while they are, past the middle.

    Returns:
        name to `Timing`, in us, a figure a call; a load that no call of lay inside the common
        time has none.
    """
    window = window_us(loads, at_least_us)
    torch.cuda.synchronize()
    gate = torch.cuda.Stream()
    opened = _event()
    with current_stream(gate):
        torch.cuda._sleep(GATE_CYCLES)
        opened.record(gate)
    queues = {name: _Queue(load, opened, calls_in(window, load)) for name, load in loads.items()}
    while any(queue.fill(share=0.1) for queue in queues.values()):
        pass
    if while_busy is not None:
        time.sleep(0.6 * window / 1e6)
        while_busy()
    torch.cuda.synchronize()
    found = spans_inside({name: queue.marks_us(opened) for name, queue in queues.items()})
    return {name: Timing(spans) for name, spans in found.items() if spans}


class _Queue:
    """Enqueues a load's calls a few at a time, so that no stream is filled long before another."""

    def __init__(self, load: Load, after: Any, calls: int) -> None:
        self.load, self.calls = load, calls
        self.events = [_event()]
        load.stream.wait_event(after)
        self.events[0].record(load.stream)

    def fill(self, share: float) -> bool:
        """Enqueue a share of the calls; whether any is left."""
        done = len(self.events) - 1
        stop = min(self.calls, done + math.ceil(share * self.calls))
        with current_stream(self.load.stream):
            for i in range(done, stop):
                self.load.call(i)
                event = _event()
                event.record(self.load.stream)
                self.events.append(event)
        return stop < self.calls

    def marks_us(self, origin: Any) -> list[float]:
        self.load.stream.synchronize()  # the device's own wait may end before a partition's graphs
        return [1e3 * origin.elapsed_time(event) for event in self.events]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)
