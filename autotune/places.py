"""Where cells are measured: a partition of each budget, and its complement for a neighbour."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from smkern.bench.stage import release_library_workspaces, side_for
from smkern.bench.timing import current_stream
from smkern.device import Budget, Confinement, device_info

_NEIGHBOUR_BYTES = 256 << 20
_COPIES_A_GRAPH = 16
_GRAPHS_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A budget, a stream that has it, and a stream on the rest of the device, if any."""

    budget: Budget
    stream: Any
    neighbour_stream: Any | None = None


@dataclass(slots=True)
class Places:
    """The places of several budgets; a context manager that makes and closes the ladder.

    Args:
        budgets: SM counts wanted. The device's own count is the whole chip, without a mask.
        confined: `mask` for green partitions, `grid` for budgets that the grid alone keeps.
        device: index of the GPU.
    """

    budgets: Iterable[int]
    confined: Iterable[Confinement] = ("mask",)
    device: int = 0
    missing: list[int] = field(init=False, default_factory=list)
    _found: list[Place] = field(init=False, default_factory=list)
    _stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> list[Place]:
        total = device_info(self.device).num_sms
        counts = sorted(set(self.budgets))
        stream = torch.cuda.Stream(self.device)
        try:
            for num_sms in counts:
                if num_sms >= total:
                    self._found.append(Place(Budget(total, "mask", True), stream))
                elif "grid" in self.confined:
                    self._found.append(Place(Budget(num_sms, "grid", True), stream))
            if "mask" in self.confined:
                self._make_partitions([n for n in counts if n < total], total)
        except BaseException:
            self._stack.close()
            raise
        return list(dict.fromkeys(self._found))

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        release_library_workspaces()
        self._found.clear()
        self._stack.close()

    def _make_partitions(self, counts: list[int], total: int) -> None:
        from smkern.partition import ladder

        sides = {n: side for n in counts if (side := side_for(n, total, "spread"))}
        self.missing += [n for n in counts if n not in sides]
        if not sides:
            return
        rungs = sorted({decode for decode, _ in sides.values()})
        made = ladder(rungs, atom=2, device=self.device, placement="spread")
        self._stack.enter_context(made)
        for num_sms, (decode, own_side) in sides.items():
            split = made.split(decode=decode)
            own, other = split.decode, split.prefill
            if own_side == "prefill":
                own, other = other, own
            if own.num_sms != num_sms:
                self.missing.append(num_sms)
                continue
            budget = Budget(own.num_sms, own.confined, own.clusters)
            self._found.append(Place(budget, own.stream, other.stream))


@contextmanager
def memory_bound_neighbour(stream: Any) -> Iterator[None]:
    """Keep the partition of `stream` copying memory for as long as the context lasts.

    A thread replays a captured graph of copies, a few in flight, so the neighbour never pauses and
    ends within a millisecond or so of the context.
    """
    source = torch.empty(_NEIGHBOUR_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    with current_stream(stream):
        # an elementwise kernel, because a copy may go to a copy engine, outside the partition
        torch.bitwise_not(source, out=target)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_COPIES_A_GRAPH):
            torch.bitwise_not(source, out=target)
        graph.capture_end()
    stop = threading.Event()
    thread = threading.Thread(target=_replay_until, args=(graph, stream, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        stream.synchronize()
        torch.cuda.synchronize()
        graph.reset()


def _replay_until(graph: Any, stream: Any, stop: threading.Event) -> None:
    in_flight: list[Any] = []
    with current_stream(stream):
        while not stop.is_set():
            if len(in_flight) >= _GRAPHS_IN_FLIGHT:
                in_flight.pop(0).synchronize()
            graph.replay()
            event = torch.cuda.Event()
            event.record(stream)
            in_flight.append(event)
