"""What it costs a prompt to be launched layer by layer, against one launch of everything."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from smkern.bench.runtime.cases import OVERHEAD, Cell
from smkern.bench.runtime.pump import Feed, decode_steps, groups_of_one, pump
from smkern.bench.runtime.rig import Rig
from smkern.partition import Partition, PartitionGraph
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import Place

ROUNDS = 3
PROMPTS = 3
"""A round of a way; the first is not counted."""


class OneLaunch:
    """A prompt as one graph on its partition; on a CPU all layers at once."""

    def __init__(self, rig: Rig, place: Place) -> None:
        self._graph: PartitionGraph | None = None
        self._run: Callable[[], None] = lambda: rig.side.layers(0, rig.side.num_layers, place)
        device = rig.device
        if isinstance(device, CudaDevice):
            partition = device.partition(place)
            assert isinstance(partition, Partition)
            with partition:
                self._run()
            partition.synchronize()
            with partition.capture() as self._graph:
                self._run()
            torch.cuda.synchronize()

    def __call__(self, place: Place) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()


def layerwise(rig: Rig, rung: int) -> Iterator[Cell]:
    """Layer by layer through the interleaver over one graph of all, minus 1; alone and beside."""
    rig.prepare(rung)
    marks, layers = rig.prefill_marks, rig.side.num_layers
    whole = OneLaunch(rig, rig.place("prefill", rung))

    def at_once(place: Place) -> None:
        whole(place)
        marks.mark()

    eager = groups_of_one(rig.side, layers, marks)
    ways: dict[str, list[Work]] = {
        "graph": [Work("prefill", at_once)],
        "eager": eager,
        "layerwise": _ended(rig, 1),
    }
    try:
        for beside in (False, True):
            found = _rounds(rig, rung, ways, beside=beside)
            cell = rig.plan.cell(OVERHEAD, rig.side.provider, None, "fraction", beside=beside)
            best = min(found["graph"], found["eager"])
            yield cell | {
                "value": round(found["layerwise"] / best - 1, 5),
                "over_graph": round(found["layerwise"] / found["graph"] - 1, 5),
                "over_eager": round(found["layerwise"] / found["eager"] - 1, 5),
                "prompt_ms": {name: round(us / 1e3, 4) for name, us in found.items()},
                "rung": rung,
            }
    finally:
        whole.close()


def _ended(rig: Rig, group: int) -> list[Work]:
    """A prompt's groups of which the last is stamped."""
    works = groups_of_one(rig.side, group, None)
    return [*works[:-1], groups_of_one(rig.side, group, rig.prefill_marks)[-1]]


def _rounds(rig: Rig, rung: int, ways: dict[str, list[Work]], *, beside: bool) -> dict[str, float]:
    """Median us of a prompt by way, in interleaved rounds."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, works in ways.items():
            lanes = rig.lanes(rung)
            prompt = Feed("prefill", 2, iter(works * PROMPTS))
            feeds = [Feed("decode", 2, decode_steps(rig.side))] if beside else []
            total = PROMPTS * len(works)

            def go_on(
                prompt: Feed = prompt, lanes: Interleaver = lanes, total: int = total
            ) -> bool:
                return prompt.launched < total or lanes.queued("prefill") > 0

            pump(lanes, [*feeds, prompt], go_on)
            ends = rig.prefill_marks.us()
            found[name] += [b - a for a, b in pairwise(ends)]
    return {name: statistics.median(values) for name, values in found.items()}
