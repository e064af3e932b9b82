"""Device time of short calls: CUDA graphs, rotated buffers, interleaved rounds, medians.

A case is captured once as a graph of several calls on its own stream. A round replays every case
once, one after another, so that clock and temperature drift hits all alike; the ratio of two cases
is the median of their ratios in each round.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Call = Callable[[int], Any]
"""call(i) enqueues one call on the current stream with buffer set i (modulo the number of sets)."""

MIN_TOTAL_BYTES = 150_000_000
"""Total size of rotated operands, bytes: 2.5 times an H200's L2."""

_FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.@+-]+)+/(?=\w)")
"""Of an absolute path all but the file's name: results are for other machines to read."""
_HEAD_START_CYCLES = 1_200_000
"""About 0.6 ms of spinning, which puts the host ahead of the device before the first replay."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call, one value per round, in the order of the rounds."""

    us_all: tuple[float, ...]

    @property
    def us_median(self) -> float:
        return statistics.median(self.us_all)

    @property
    def noise(self) -> float:
        """Half the interquartile range over the median: 0.01 is 1%."""
        if len(self.us_all) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.us_all, n=4, method="inclusive")
        return (high - low) / 2 / self.us_median


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Args:
        call: enqueues one call on the current stream, with the given buffer set.
        stream: a non-default `torch.cuda.Stream`; the graph runs on its partition.
        calls: calls per graph; see `calls_for`.
        first_set: buffer set of the first call; neighbours in a round should have different ones.
    """

    call: Call
    stream: Any
    calls: int = 1
    first_set: int = 0


def ratio(numerator: Timing, denominator: Timing) -> float:
    """Median of the round-by-round ratios of two cases of the same rounds."""
    if len(numerator.us_all) != len(denominator.us_all):
        return numerator.us_median / denominator.us_median
    pairs = zip(numerator.us_all, denominator.us_all, strict=True)
    return statistics.median(a / b for a, b in pairs)


def sets_for(bytes_moved: int, *, least: int = 2, most: int = 64) -> int:
    """Operand sets to rotate over, so that a call moving `bytes_moved` finds none of them in L2."""
    return min(most, max(least, -(-MIN_TOTAL_BYTES // bytes_moved)))


def calls_for(expected_us: float, *, target_us: float = 250.0, at_most: int = 48) -> int:
    """Calls per graph for a replay of about `target_us`.

    Launch and events add 1 to 2 us to a replay: under 1% at 250 us.
    """
    return max(1, min(at_most, math.ceil(target_us / max(expected_us, 1e-3))))


def rounds_for(replay_us: float, *, budget_us: float, at_least: int = 3, at_most: int = 9) -> int:
    """Odd number of rounds that fit `budget_us` when a round of all cases takes `replay_us`."""
    rounds = int(budget_us / max(replay_us, 1e-3))
    return max(at_least, min(at_most, rounds)) | 1


def capture(case: Case) -> torch.cuda.CUDAGraph:
    """Capture the case's calls on its stream. The caller must have run the case eagerly before.

    `torch.cuda.graph` would collect garbage and empty the allocator's cache each time; a suite
    captures thousands of graphs, so this begins and ends the capture itself.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(case.stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i in range(case.calls):
                case.call(case.first_set + i)
        except BaseException:
            _abandon(graph)
            raise
        graph.capture_end()
    return graph


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture whose body raised; the stream must not stay in capture mode."""
    try:
        graph.capture_end()
    except RuntimeError:
        return


def time_interleaved(
    cases: Mapping[str, Case],
    *,
    rounds: int = 7,
    while_busy: Callable[[], None] | None = None,
    errors: MutableMapping[str, str] | None = None,
) -> dict[str, Timing]:
    """Time `cases` in interleaved rounds; each stream waits for the one before it.

    Everything is queued behind a short spin and read once at the end, so no launch gap is timed.

    Args:
        cases: name to case; each has run eagerly at least once (compiled, loaded, allocated).
        rounds: measured rounds; one unmeasured round precedes them.
        while_busy: called once while the device works through the queue (clocks, power).
        errors: if given, receives the error of each case that cannot be captured, which is then
            left out; otherwise the exception is raised.

    Returns:
        name to `Timing`, in us per call, one value per round.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    try:
        for name, case in cases.items():
            try:
                graphs[name] = capture(case)
            except Exception as error:
                if errors is None:
                    raise
                errors[name] = first_line(error)
        return _replay_rounds(cases, graphs, rounds, while_busy)
    finally:
        # Newest first: cuBLAS graphs of one stream share a captured workspace.
        if graphs:
            torch.cuda.synchronize()
        for name in reversed(list(graphs)):
            graphs.pop(name).reset()


def time_within(
    budget_us: float,
    cases: Mapping[str, Case],
    *,
    while_busy: Callable[[], None],
    errors: MutableMapping[str, str],
) -> dict[str, Timing]:
    """`time_interleaved` in about `budget_us` of device time.

    A first round determines the calls per graph and the number of rounds that fit.
    """
    if not cases:
        return {}
    once = time_interleaved(cases, rounds=1, errors=errors)
    cases = {
        name: replace(case, calls=calls_for(once[name].us_median))
        for name, case in cases.items()
        if name in once
    }
    replay_us = sum(once[name].us_median * case.calls for name, case in cases.items())
    rounds = rounds_for(replay_us, budget_us=budget_us)
    return time_interleaved(cases, rounds=rounds, while_busy=while_busy, errors=errors)


def _replay_rounds(
    cases: Mapping[str, Case],
    graphs: Mapping[str, torch.cuda.CUDAGraph],
    rounds: int,
    while_busy: Callable[[], None] | None,
) -> dict[str, Timing]:
    if not graphs:
        return {}
    torch.cuda.synchronize()
    with torch.cuda.stream(cases[next(iter(graphs))].stream):
        torch.cuda._sleep(_HEAD_START_CYCLES)
        last = _event()
        last.record(cases[next(iter(graphs))].stream)
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for round_index in range(rounds + 1):
        for name in _rotated(list(graphs), round_index):
            stream = cases[name].stream
            stream.wait_event(last)
            start, last = _event(), _event()
            with torch.cuda.stream(stream):
                start.record(stream)
                graphs[name].replay()
                last.record(stream)
            if round_index:
                spans[name].append((start, last))
    if while_busy is not None:
        while_busy()
    last.synchronize()  # a device-wide wait may end before a graph on a partition's stream does
    torch.cuda.synchronize()
    return {
        name: Timing(tuple(1e3 * a.elapsed_time(b) / cases[name].calls for a, b in pairs))
        for name, pairs in spans.items()
    }


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _rotated(names: Sequence[str], by: int) -> list[str]:
    """The names, starting at another one each round, so that every case takes every position."""
    at = by % len(names)
    return [*names[at:], *names[:at]]


def run_eagerly(call: Call, stream: Any) -> None:
    """Run one call on `stream` and wait: compiles, loads, and allocates library workspaces."""
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    """An error's type and first line, short enough for a table cell: of paths the file's name."""
    return _FOLDERS.sub("", f"{type(error).__name__}: {error}".splitlines()[0])


def try_eagerly(call: Call, stream: Any) -> str | None:
    """`run_eagerly` that returns None on success and the error's first line on failure.

    cuBLAS raises where its kernels need clusters that a partition cannot launch. The error is not
    sticky, but the next launch check may report it once more; this consumes that report.
    """
    try:
        run_eagerly(call, stream)
    except Exception as error:  # noqa: BLE001  any error of a peer is its result
        message = first_line(error)
        _clear_last_error()
        return message
    return None


def _clear_last_error() -> None:
    for _ in range(2):
        try:
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        return
