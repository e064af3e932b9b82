"""What launching costs: a prompt layer by layer, against the same launches as one graph, in which
no kernel waits for the host."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

from smkern.bench.runtime.cases import OVERHEAD, Cell
from smkern.bench.runtime.steady_bench import Feed, SteadyBench, pump
from smkern.measure.captured import Captured, Run
from smkern.partition import Partition
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Work
from smkern.runtime.place import Place

ROUNDS, PROMPTS = 3, 3
"""Prompts of a round; the first is not counted."""


def layerwise(bench: SteadyBench, rung: int) -> Iterator[Cell]:
    """Layer by layer through the interleaver over one graph of all, minus 1; alone and beside."""
    bench.prepare(rung)
    marks, layers = bench.prefill_marks, bench.steps.num_layers
    graph = _prompt_graph(bench, bench.place("prefill", rung))

    def at_once(place: Place) -> None:
        graph.replay()
        marks.mark()

    ways: dict[str, list[Work]] = {
        "graph": [Work("prefill", at_once)],
        "eager": bench.prompt(layers, marks),
        "layerwise": [*bench.prompt(1)[:-1], bench.prompt(1, marks)[-1]],
    }
    try:
        for beside in (False, True):
            found = _rounds(bench, rung, ways, beside=beside)
            best = min(found["graph"], found["eager"])
            value = round(found["layerwise"] / best - 1, 5)
            yield bench.cell(OVERHEAD, value, "fraction", beside=beside) | {
                "over_graph": round(found["layerwise"] / found["graph"] - 1, 5),
                "over_eager": round(found["layerwise"] / found["eager"] - 1, 5),
                "prompt_ms": {name: round(us / 1e3, 4) for name, us in found.items()},
                "rung": rung,
            }
    finally:
        graph.close()


def _prompt_graph(bench: SteadyBench, place: Place) -> Captured:
    """A prompt as one graph on its partition; on a CPU all layers at once."""
    partition = None
    if isinstance(bench.device, CudaDevice):
        partition = bench.device.partition(place)
        assert isinstance(partition, Partition)
    run: Run = lambda: bench.steps.layers(0, bench.steps.num_layers, place)  # noqa: E731
    return Captured(run, partition, on_gpu=partition is not None)


def _rounds(
    bench: SteadyBench, rung: int, ways: dict[str, list[Work]], *, beside: bool
) -> dict[str, float]:
    """Median us of a prompt by way, in interleaved rounds."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, works in ways.items():
            found[name] += _prompt_us(bench, rung, works, beside=beside)
    return {name: statistics.median(values) for name, values in found.items()}


def _prompt_us(bench: SteadyBench, rung: int, works: list[Work], *, beside: bool) -> list[float]:
    """us from each prompt's end to the next one's."""
    lanes = bench.lanes(rung)
    prompt = Feed("prefill", 2, iter(works * PROMPTS))
    feeds = [Feed("decode", 2, bench.decode_steps())] if beside else []
    total = PROMPTS * len(works)
    pump(lanes, [*feeds, prompt], lambda: prompt.launched < total or lanes.queued("prefill") > 0)
    return [b - a for a, b in pairwise(bench.prefill_marks.us())]
