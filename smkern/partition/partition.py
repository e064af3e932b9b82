"""A partition: a stream whose work stays on some SMs, graphs captured on it, and the proof."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from smkern.device import Budget, Confinement
from smkern.errors import ConfinementError, PartitionError

_PROBE_CTAS_PER_SM = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """The split that made a partition. Only partitions of one origin can be known as disjoint."""

    backend: str
    device: int
    atom: int
    placement: str
    token: object = field(default_factory=object, repr=False)


class PartitionGraph:
    """A CUDA graph that was captured on a partition and runs there, whatever stream launches it."""

    def __init__(self, partition: Partition, graph: Any) -> None:
        self.partition = partition
        self._graph = graph

    @property
    def closed(self) -> bool:
        return self._graph is None

    def replay(self) -> None:
        """Launch the graph on torch's current stream; it runs on the partition's SMs.

        Raises:
            PartitionError: the graph or its partition is closed.
        """
        if self._graph is None or self.partition.closed:
            raise PartitionError(
                "this graph or its partition is closed: capture it again on an open one"
            )
        self._graph.replay()

    def close(self) -> None:
        """Destroy the graph; its last launch must have finished."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class Partition:
    """A set of SMs of one GPU, and a stream confined to them. Made by `ladder()` or `split()`.

    Inside `with partition:` its stream is torch's current one, and its realised SM count is the
    default budget of every operator.

    Attributes:
        num_sms: SMs granted.
        requested: SMs requested.
        confined: "mask" (the hardware keeps work inside) or "grid" (only the CTA count does).
        clusters: whether kernels with thread-block clusters can launch here.
        smids: ids of its SMs; empty for "grid".
        stream: torch stream; `raw_stream` is its handle as an int.
        device: GPU index.

    Source: MuxWise section 3.1, DuetServe section 4.2: green contexts as compute partitions.
    """

    def __init__(
        self,
        origin: Origin,
        requested: int,
        budget: Budget,
        smids: tuple[int, ...],
        stream: Any,
        run_probe: Callable[[int, int], list[int]],
        release: Callable[[], None],
    ) -> None:
        self.origin = origin
        self.requested = requested
        self.budget = budget
        self.smids = smids
        self.stream = stream
        self.raw_stream: int = stream.cuda_stream
        self.device = origin.device
        self.closed = False
        self._run_probe = run_probe
        self._release = release
        self._graphs: weakref.WeakSet[PartitionGraph] = weakref.WeakSet()
        self._entered = threading.local()

    @property
    def num_sms(self) -> int:
        return self.budget.num_sms

    @property
    def confined(self) -> Confinement:
        return self.budget.confined

    @property
    def clusters(self) -> bool:
        return self.budget.clusters

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"stream {self.raw_stream:#x}"
        return f"Partition({self.num_sms} SMs, {self.confined}, {state})"

    def check_open(self) -> None:
        """Raise `PartitionError` if this partition is closed."""
        if self.closed:
            raise PartitionError(
                f"this partition of {self.num_sms} SMs is closed: make a new ladder, and keep it "
                "for as long as anything runs on it"
            )

    def __enter__(self) -> Partition:
        import torch

        self.check_open()
        stack = self._entered.__dict__.setdefault("stack", [])
        stack.append((torch.cuda.current_device(), torch.cuda.current_stream(self.device)))
        torch.cuda.set_stream(self.stream)
        return self

    def __exit__(self, *error: object) -> None:
        import torch

        device, stream = self._entered.stack.pop()
        torch.cuda.set_stream(stream)
        if device != self.device:  # which `set_stream` has made torch's current one
            torch.cuda.set_device(device)

    def synchronize(self) -> None:
        """Wait for all work on this partition's stream, then on the device.

        `torch.cuda.synchronize()` alone may return while a graph launched on a partition's stream
        still runs (seen on driver 580 with two replays in flight).
        """
        import torch

        if not self.closed:
            self.stream.synchronize()
        torch.cuda.synchronize(self.device)

    @contextmanager
    def capture(self, pool: Any = None) -> Iterator[PartitionGraph]:
        """Capture what the block launches on this partition's stream as a graph.

        Args:
            pool: memory pool to share between graphs, as `torch.cuda.graph` takes it.

        Yields:
            The graph, which can be launched after the block.
        """
        import torch

        self.check_open()
        graph = torch.cuda.CUDAGraph()
        captured = PartitionGraph(self, graph)
        with torch.cuda.graph(
            graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            yield captured
        self._graphs.add(captured)

    def launch(self, graph: PartitionGraph) -> None:
        """Launch a graph on this partition's stream.

        Raises:
            PartitionError: the graph is closed, or was captured on another partition, where it
                would run.
        """
        self.check_open()
        if graph.partition is not self:
            raise PartitionError(
                f"this graph was captured on {graph.partition!r} and runs there whatever stream "
                f"launches it, not on {self!r}: capture one on each partition"
            )
        with self:
            graph.replay()

    def disjoint(self, other: Partition) -> bool:
        """Whether this partition and another share no SM.

        Raises:
            PartitionError: they come from different driver splits, which overlap arbitrarily, or
                no mask confines them.
        """
        if self.origin.token is not other.origin.token:
            raise PartitionError(
                f"{self!r} and {other!r} come from different ladders, whose SMs overlap: take both "
                "from one ladder"
            )
        if self.confined != "mask" or other.confined != "mask":
            raise PartitionError(
                "partitions of the grid backend have no SMs of their own; use backend='green'"
            )
        return not set(self.smids) & set(other.smids)

    def verify(self) -> None:
        """Check by every CTA's %smid that eager work and a replayed graph stay inside.

        Raises:
            ConfinementError: a CTA ran outside, or the work reached another number of SMs.
        """
        self.check_open()
        mask = self.confined == "mask"
        num_ctas = self.num_sms * (_PROBE_CTAS_PER_SM if mask else 1)
        self._check_seen(self._run_probe(self.raw_stream, num_ctas), "launched eagerly")
        if mask:
            self._check_seen(self._replayed_smids(num_ctas), "replayed from a graph")

    def _replayed_smids(self, num_ctas: int) -> list[int]:
        """SMs of a captured probe, launched from an ordinary stream."""
        import torch

        from smkern.partition.probe import probe_of

        probe = probe_of(self.device)
        out = probe.output(num_ctas)
        with self.capture() as graph:
            probe.launch(self.raw_stream, out)
        graph.replay()
        torch.cuda.current_stream(self.device).synchronize()
        graph.close()
        return out.tolist()

    def _check_seen(self, seen: list[int], how: str) -> None:
        used = set(seen)
        if self.confined == "grid":
            if len(used) > self.num_sms:
                raise ConfinementError(
                    f"a grid of {self.num_sms} CTAs {how} ran on {len(used)} SMs"
                )
            return
        outside = sorted(used - set(self.smids))
        if outside:
            raise ConfinementError(
                f"work {how} on {self!r} ran on SMs {outside}, outside its {list(self.smids)}: "
                "report the driver's version; use backend='grid' meanwhile"
            )
        if len(used) < self.num_sms:
            raise ConfinementError(
                f"work {how} on {self!r} reached {len(used)} of its {self.num_sms} SMs: another "
                "kernel held the rest, or the driver granted less than it reported"
            )

    def release_graphs(self) -> None:
        """Destroy the graphs captured on this partition, after all work has finished."""
        for graph in list(self._graphs):
            graph.close()

    def close(self, *, tensors: bool = True) -> None:
        """Wait for all work, then destroy the stream and its context. Closing twice is fine.

        Pinned tensors that torch copied from or to on this stream must be freed before: torch
        records an event on the stream when they are freed, and aborts the process if it is gone.

        Args:
            tensors: also refuse while torch's allocator holds live tensors of this stream.

        Raises:
            PartitionError: a graph captured here, or a tensor of its stream, is still alive.
        """
        if self.closed:
            return
        self.synchronize()
        alive = sum(not graph.closed for graph in self._graphs)
        if alive:
            raise PartitionError(
                f"{alive} graphs captured on {self!r} are alive and would run on freed SMs: close "
                "them first (PartitionGraph.close())"
            )
        from smkern.partition.streams import stream_budgets

        streams = stream_budgets(self.device)
        streams.forget(self.raw_stream)
        live_bytes = _live_bytes(self.raw_stream) if tensors else 0
        if live_bytes:
            raise PartitionError(
                f"{live_bytes} bytes of tensors allocated on {self!r} are alive: free them first, "
                "or allocate on an ordinary stream and pass out="
            )
        streams.remove(self.raw_stream)
        self.closed = True
        self._release()
        # as long as this object is alive, work on its stream raises with the reason
        weakref.finalize(self, streams.reusable, self.raw_stream).atexit = False


def _live_bytes(raw_stream: int) -> int:
    """Bytes of live tensors in torch's allocator for a stream."""
    import torch

    segments = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in segments if s["stream"] == raw_stream)


@dataclass(frozen=True, slots=True)
class Split:
    """Two disjoint partitions that together make up the whole device; with the grid backend they
    only share its SMs by count."""

    decode: Partition
    prefill: Partition

    def __iter__(self) -> Iterator[Partition]:
        return iter((self.decode, self.prefill))
