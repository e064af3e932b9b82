"""Rates of two streams' work while both are busy: what each keeps beside the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from smkern.measure.sm_clock import Clock, NoClock
from smkern.measure.timing import Timing, run_eagerly

WINDOW_US = 40_000.0
"""How long the streams are kept busy, unless more is asked for."""
MIN_CALLS = 6
SETTLE = 0.3
"""This share of the common time is left out at its start: clocks are still falling."""
GATE_CYCLES = 10_000_000
"""About 5 ms in which the host fills the queues."""
NEIGHBOUR_S = 0.3
"""How long a neighbour runs before anything beside it is timed: the clock falls for so long."""
SLOWEST = 3.0
"""How many times as long work takes beside a neighbour, as a first guess."""
ROUNDS = 5
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

    @classmethod
    def of(cls, call: Callable[[int], Any], stream: Any) -> Load:
        """The work with the time of its second call, with nothing beside it."""
        run_eagerly(call, stream)
        begin, end = _event(), _event()
        with torch.cuda.stream(stream):
            begin.record(stream)
            call(0)
            end.record(stream)
        end.synchronize()
        return cls(call, stream, max(1.0, 1e3 * float(begin.elapsed_time(end))))


def window_us(loads: Mapping[str, Load], at_least_us: float = WINDOW_US) -> float:
    """Microseconds to keep all streams busy: `MIN_CALLS` of the longest call at the least."""
    return max(at_least_us, MIN_CALLS * max(load.expected_us for load in loads.values()))


def calls_in(window: float, load: Load, least: int = MIN_CALLS) -> int:
    return max(least, min(MAX_CALLS, math.ceil(window / load.expected_us)))


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
    while_busy: Callable[[], None],
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
    with torch.cuda.stream(gate):
        torch.cuda._sleep(GATE_CYCLES)
        opened.record(gate)
    queues = {name: _Queue(load, calls_in(window, load), opened) for name, load in loads.items()}
    while any(queue.fill(share=0.1) for queue in queues.values()):
        pass
    time.sleep(0.6 * window / 1e6)
    while_busy()
    torch.cuda.synchronize()
    found = spans_inside({name: queue.marks_us(opened) for name, queue in queues.items()})
    return {name: Timing(spans) for name, spans in found.items() if spans}


@dataclass(frozen=True, slots=True)
class Beside:
    """What probes took beside a neighbour, and it beside them.

    Args:
        probes: name to us a call, a figure a round.
        neighbour: us a call; None where none lay inside the probes' time.
        sm_mhz: the clock of the probes' SMs, by their own count.
    """

    probes: Mapping[str, Timing]
    neighbour: Timing | None
    sm_mhz: float | None


def time_beside(
    probes: Mapping[str, Load],
    neighbour: Load,
    clock: Clock | None = None,
    *,
    while_busy: Callable[[], None] = lambda: None,
) -> Beside:
    """Time probes by turns on their stream beside a neighbour that never runs dry.

    All of them, and the clock in between, see the same neighbour. Each has run eagerly before.

    Args:
        probes: name to work, all on one stream.
        neighbour: work on another stream, from `NEIGHBOUR_S` before until after the probes.
        clock: read on the probes' stream after each probe.
        while_busy: called once meanwhile.
    """
    clock = clock or NoClock()
    window = max(WINDOW_US, MIN_CALLS * neighbour.expected_us) / ROUNDS / len(probes)
    bursts = {name: calls_in(window, load, least=1) for name, load in probes.items()}
    alone = ROUNDS * sum(bursts[name] * load.expected_us for name, load in probes.items())
    settle = math.ceil(1e6 * NEIGHBOUR_S / neighbour.expected_us)
    after = math.ceil(SLOWEST * alone / neighbour.expected_us) + MIN_CALLS
    while True:
        torch.cuda.synchronize()
        queue = _Queue(neighbour, settle + after)
        queue.fill(share=1.0)
        marks = queue.events
        marks[settle].synchronize()
        clock.mhz()
        spans = _bursts(probes, bursts, clock)
        while_busy()
        last = spans[-1][2]
        last.synchronize()
        if not marks[-1].query():
            break
        neighbour.stream.synchronize()
        after *= 2
    neighbour.stream.synchronize()
    origin = marks[0]
    timings = {
        name: Timing(
            tuple(1e3 * a.elapsed_time(b) / bursts[name] for n, a, b in spans if n == name)
        )
        for name in probes
    }
    begin, end = (origin.elapsed_time(event) for event in (spans[0][1], last))
    times = [origin.elapsed_time(mark) for mark in marks]
    inside = [1e3 * (b - a) for a, b in pairwise(times) if a >= begin and b <= end]
    return Beside(timings, Timing(tuple(inside)) if inside else None, clock.mhz())


def _bursts(
    probes: Mapping[str, Load], calls: Mapping[str, int], clock: Clock
) -> list[tuple[str, Any, Any]]:
    """Enqueue the probes' rounds: (name, event before, event after) of each burst."""
    spans = []
    for name, load in ROUNDS * list(probes.items()):
        begin, end = _event(), _event()
        with torch.cuda.stream(load.stream):
            begin.record(load.stream)
            for i in range(calls[name]):
                load.call(i)
            end.record(load.stream)
        clock.read()
        spans.append((name, begin, end))
    return spans


class _Queue:
    """Enqueues a load's calls a few at a time, so that no stream is filled long before another."""

    def __init__(self, load: Load, calls: int, after: Any = None) -> None:
        self.load, self.calls = load, calls
        self.events = [_event()]
        if after is not None:
            load.stream.wait_event(after)
        self.events[0].record(load.stream)

    def fill(self, share: float) -> bool:
        """Enqueue a share of the calls; whether any is left."""
        done = len(self.events) - 1
        stop = min(self.calls, done + math.ceil(share * self.calls))
        with torch.cuda.stream(self.load.stream):
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
