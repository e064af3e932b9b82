"""Ranks that measure together: the same calls on all of them, timed on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from smkern.measure.partitions import Partitions, Place
from smkern.measure.timing import Case, Timing, capture
from smkern.models import TensorParallel
from smkern.models.tensor_parallel import Collective

HEAD_START_CYCLES = 2_000_000
"""About 1 ms of spinning: hosts are ahead of their GPUs when what is timed begins."""

Lanes = tuple[Collective, Collective]
"""The sums of decode steps, and of prompts."""


class RankGroup:
    """The ranks of a run.

    Args:
        partitions: Where this rank's GPU measures.
    """

    def __init__(self, tp: TensorParallel, partitions: Partitions) -> None:
        self.tp = tp
        self._partitions = partitions
        self._one = torch.ones(1, device="cuda")
        self.nccl: Lanes = tp.decode, tp.prefill

    def place(self, num_sms: int) -> Place:
        """The whole device, or a spread partition of it."""
        found = self._partitions.at(num_sms)
        assert found is not None, num_sms
        return found

    def wait(self) -> None:
        """Until all ranks are here, and their GPUs idle."""
        torch.cuda.synchronize()
        self.tp.everyones(None)

    @contextmanager
    def using(self, lanes: Lanes) -> Iterator[None]:
        """Sums of forwards, for a while."""
        before = self.tp.decode, self.tp.prefill
        self.tp.decode, self.tp.prefill = lanes
        try:
            yield
        finally:
            self.tp.decode, self.tp.prefill = before

    def time_graphs(
        self, calls: Mapping[str, Callable[[int], Any]], place: Place, *, count: int, rounds: int
    ) -> dict[str, Timing]:
        """Microseconds of a call, from graphs of `count`."""
        graphs = {}
        for name, call in calls.items():
            with torch.cuda.stream(place.stream):
                call(0)
            self.wait()
            graphs[name] = capture(Case(call, place.stream, count))
        runs = {name: graph.replay for name, graph in graphs.items()}
        found = self.time(runs, place, rounds=rounds)
        for graph in graphs.values():
            graph.reset()
        return {
            name: Timing(tuple(us / count for us in timing.us_all))
            for name, timing in found.items()
        }

    def time(
        self, runs: Mapping[str, Callable[[], Any]], place: Place, *, rounds: int
    ) -> dict[str, Timing]:
        """Microseconds of each, by turns; all ranks begin one at the same time.

        A sum over all ranks is in front of each: it ends everywhere within microseconds.
        """
        found: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(rounds + 1):
            for name, run in runs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.wait()
                with torch.cuda.stream(place.stream):
                    torch.cuda._sleep(HEAD_START_CYCLES)
                    self.nccl[0].all_reduce(self._one)
                    begin.record(place.stream)
                    run()
                    end.record(place.stream)
                torch.cuda.synchronize()
                if turn:
                    found[name].append(1e3 * begin.elapsed_time(end))
        return {name: Timing(tuple(us)) for name, us in found.items()}
