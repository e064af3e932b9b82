"""How long the device idles inside a mixed forward that is launched kernel by kernel."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import repeat

import torch

from smkern.bench.runtime.cases import MIXED_IDLE, Cell
from smkern.bench.runtime.figures import Spans
from smkern.bench.runtime.pump import Feed, pump
from smkern.bench.runtime.rig import Rig
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Work

ROUNDS, STEPS = 2, 8
"""The first two steps of a round are not counted."""

Run = Callable[[], None]


def mixed_idle(rig: Rig, chunk: int) -> Iterator[Cell]:
    """1 minus the time of the same forward as a graph, in which no kernel waits for the host."""
    launch = rig.side.mixed(chunk, (rig.plan.tokens - chunk) // 2)
    replay, close = _captured(rig, launch)
    found: dict[str, list[float]] = {"eager": [], "graph": []}
    try:
        for _ in range(ROUNDS):
            for name, run in (("eager", launch), ("graph", replay)):
                found[name] += _periods(rig, run)
    finally:
        close()
    us = {name: statistics.median(periods) for name, periods in found.items()}
    value = round(max(0.0, 1 - us["graph"] / us["eager"]), 5)
    yield rig.plan.cell(MIXED_IDLE, rig.side.provider, value, "fraction") | {
        "chunk": chunk,
        "eager_ms": round(us["eager"] / 1e3, 4),
        "graph_ms": round(us["graph"] / 1e3, 4),
    }


def _captured(rig: Rig, launch: Run) -> tuple[Run, Run]:
    """What replays a forward, and what destroys the graph."""
    if not isinstance(rig.device, CudaDevice):
        return launch, lambda: None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph.replay, graph.reset


def _periods(rig: Rig, run: Run) -> list[float]:
    marks = rig.decode_marks

    def step(place: object) -> None:
        marks.mark()
        run()
        marks.mark()

    lanes = rig.lanes(None)
    feed = Feed("decode", 3, repeat(Work("mixed", step), STEPS))
    pump(lanes, [feed], lambda: feed.launched < STEPS)
    return Spans.of(marks.us()).periods_us[1:]
