"""Decode graphs by place, batch and context: captured ahead, accounted, evicted, destroyed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from smkern.latency.work import padded_rows
from smkern.models.activations import ActivationBuffers
from smkern.models.graph import DecodeGraph
from smkern.models.layered import LayeredModel
from smkern.models.plan_memory import PlanMemory
from smkern.models.step import Caches, batch_bucket
from smkern.ops.workspace import Scratch
from smkern.partition import Partition
from smkern.runtime.cuda_device import DECODE_PRIORITY
from smkern.runtime.model.mixed_graph import MixedGraph, MixedInputs
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.sizes import (
    FIRST_CONTEXT,
    GraphKey,
    context_bucket,
    mixed_rows,
)
from smkern.runtime.place import Place
from smkern.tuning.attention.shapes import AttentionShape

MIB = 1 << 20
_WHOLE = Place.whole(0)
"""Where mixed forwards have graphs; how many SMs that is, they ask themselves."""


@dataclass(slots=True, eq=False)
class _Held:
    """A step that can be launched, and what it takes of the device."""

    graph: DecodeGraph | MixedGraph
    num_bytes: int = 0


class _Ready(NamedTuple):
    """Rungs that serve a batch of requests of more than `shortest` tokens, up to `longest`."""

    batch: int
    shortest: int
    longest: int
    rungs: tuple[int | None, ...]


class GraphCache:
    """Decode steps of a model, one for each place, bucket of rows and bucket of context; layers of
    mixed forwards on the whole device, one for each bucket of rows and of context.

    All are launched from one stream, so they share activations, attention's plan, workspaces and a
    memory pool: a graph has little more than its nodes for itself. In the serving loop nothing is
    captured: where a graph is missing, one of more rows or context runs, else the operators, launch
    by launch; `missed` remembers it, and `capture_missed` makes up for it when nothing runs.

    Args:
        num_sms: SMs of every operator. None: all that the place has.
        limit_bytes: Limit of the graphs' memory, without what they share; those unused longest go
            first, and none goes for one that is captured with it.
        mixed: What mixed forwards read. None: there are none.

    Attributes:
        missed: What was asked for and not there.
        refused: What the device had no memory for, and its words.
    """

    def __init__(
        self,
        model: LayeredModel,
        state: RowState,
        caches: Caches,
        *,
        partition: Callable[[Place], Partition | None],
        synchronize: Callable[[], None],
        max_context: int,
        limit_bytes: int,
        num_sms: int | None = None,
        mixed: MixedInputs | None = None,
    ) -> None:
        rows, device = state.max_running, model.device
        self._model = model
        self._state = state
        self._caches = caches
        self._partition = partition
        self._synchronize = synchronize
        self._max_context = max_context
        self._limit_bytes = limit_bytes
        self._num_sms = num_sms
        self._mixed = mixed
        self._captures = device.type == "cuda"
        self.activations = ActivationBuffers(model.config, rows, rows, device)
        self.plans = PlanMemory(device)
        self.scratch = Scratch(device)
        self._graphs: OrderedDict[GraphKey, _Held] = OrderedDict()
        self._eager: dict[GraphKey, DecodeGraph] = {}
        self._instead: dict[GraphKey, GraphKey | None] = {}
        """What serves where a graph is missing; None: the operators."""
        self._asked: _Ready | None = None
        self.missed: dict[GraphKey, Place] = {}
        self.refused: dict[GraphKey, str] = {}
        self._pool: Any = None
        self._stream: Any = None
        if self._captures:
            self._stream = torch.cuda.Stream(device, priority=DECODE_PRIORITY)

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Device memory of the graphs and their pool, without what they share."""
        return sum(held.num_bytes for held in self._graphs.values())

    @property
    def shared_bytes(self) -> int:
        """Device memory that all graphs share: of attention's plan and of workspaces."""
        return self.plans.num_bytes + self.scratch.num_bytes

    @property
    def by_graph(self) -> dict[str, int]:
        """Bytes of each graph."""
        return {str(key): held.num_bytes for key, held in self._graphs.items()}

    def key(self, place: Place, batch: int, longest: int) -> GraphKey:
        """The bucket of a step."""
        if not self._captures:  # nothing to be saved by padding, nor by a graph a place
            return GraphKey(0, batch, self._max_context)
        return GraphKey(
            place.rung,
            batch_bucket(batch, self._state.max_running),
            context_bucket(longest, self._max_context),
        )

    def launch(self, place: Place, batch: int, longest: int) -> None:
        """Launch a decode step of the first `batch` slots, on the current stream.

        Args:
            longest: A bound of their keys.
        """
        key = self.key(place, batch, longest)
        found: GraphKey | None = key
        if key not in self._graphs:
            found = self._larger(key, place)
        if found is None:
            self._run_eagerly(key, place)
            return
        self._graphs.move_to_end(found)
        self._graphs[found].graph.launch()

    def mixed(self, rows: int, longest: int) -> MixedGraph | None:
        """The layers of a mixed forward of so many rows, or some more; None: there is no graph.

        Args:
            rows: New tokens of prompts and rows that decode.
            longest: A bound of the keys of each request.
        """
        key = self._mixed_key(rows, longest)
        if key is None:
            return None
        found = key if key in self._graphs else self._larger(key, _WHOLE)
        if found is None:
            return None
        self._graphs.move_to_end(found)
        graph = self._graphs[found].graph
        assert isinstance(graph, MixedGraph)
        return graph

    def ready(self, batch: int, longest: int) -> tuple[int | None, ...] | None:
        """Rungs, and None for the whole device, that have a graph for a decode step; None: all,
        since there are no graphs on a CPU.

        Args:
            longest: A bound of their keys.
        """
        if not self._captures:
            return None
        asked = self._asked
        if asked is not None and asked.batch == batch and asked.shortest < longest <= asked.longest:
            return asked.rungs
        rows = batch_bucket(batch, self._state.max_running)
        keys = context_bucket(longest, self._max_context)
        rungs = {
            x.rung for x in self._graphs if x.batch >= rows and x.context >= keys and not x.mixed
        }
        shortest = 0 if keys <= FIRST_CONTEXT else longest - 1
        found = tuple([rung or None for rung in sorted(rungs)])
        self._asked = _Ready(batch, shortest, keys, found)
        return found

    def capture(
        self, places: Iterable[Place], batches: Iterable[int], contexts: Iterable[int]
    ) -> int:
        """Capture the graphs of all these that are missing, as many as the limit lets stay; waits
        for the device.

        Returns:
            How many are there now that were not.
        """
        # The largest first, of every place: they serve smaller steps too, where the limit leaves no
        # more. And so nothing of the shared memory is outgrown: more SMs have more partial sums,
        # longer contexts and more rows have larger plans.
        keys = {
            self.key(place, batch, context): place
            for context in sorted(contexts, reverse=True)
            for batch in sorted(batches, reverse=True)
            for place in sorted(places, key=lambda place: -place.num_sms)
        }
        if self._captures and keys:
            largest = max(keys, key=lambda key: key.batch * key.context)
            with suppress(torch.OutOfMemoryError):  # then the captures tell
                self.plans.reserve(self._plan_shape(largest))
        return self._capture_all(keys)

    def capture_mixed(self, rows: Iterable[int], contexts: Iterable[int]) -> int:
        """As `capture`, of mixed forwards."""
        keys = [
            self._mixed_key(count, context)
            for context in sorted(contexts, reverse=True)
            for count in sorted(rows, reverse=True)
        ]
        return self._capture_all({key: _WHOLE for key in keys if key is not None})

    def capture_missed(self) -> int:
        """Capture what was asked for and not there, while nothing runs; how many."""
        missed, self.missed = self.missed, {}
        self._forget_choices()
        return self._capture_all(missed)

    def close(self) -> None:
        """Destroy all graphs; their last launches must be over. Closing twice is fine, and so is
        capturing anew."""
        for held in self._graphs.values():
            held.graph.close()
        self._graphs.clear()
        self.refused.clear()
        self._eager.clear()
        self._forget_choices()

    def _forget_choices(self) -> None:
        self._instead.clear()
        self._asked = None

    def _larger(self, key: GraphKey, place: Place) -> GraphKey | None:
        """The least graph of the same place that holds more; what was missed is noted."""
        if key not in self._instead:
            if self._captures:
                self.missed[key] = place
            fits = [
                other
                for other in self._graphs
                if other.rung == key.rung
                and other.mixed == key.mixed
                and (other.batch == key.batch if key.mixed else other.batch >= key.batch)
                and other.context >= key.context
            ]
            least = min(fits, key=lambda other: (other.batch, other.context), default=None)
            self._instead[key] = least
        return self._instead[key]

    def _run_eagerly(self, key: GraphKey, place: Place) -> None:
        """The step launch by launch, on the stream of its partition."""
        step = self._eager.get(key)
        if step is None:
            step = self._eager[key] = self._make(key, place, capture=False)
        partition = self._partition(place)
        if partition is None:
            step.launch()
            return
        here = torch.cuda.current_stream(partition.device)
        partition.stream.wait_stream(here)
        with partition:
            step.launch()
        here.wait_stream(partition.stream)

    def _capture_all(self, places: Mapping[GraphKey, Place]) -> int:
        """Capture the graphs that are missing, until one is over the limit without any that was
        there before; how many stay."""
        made = 0
        for key, place in places.items():
            if not self._capture(key, place):
                continue
            made += 1
            self._evict(made)
            if self.num_bytes > self._limit_bytes and made > 1:
                self._drop(key)
                return made - 1
        return made

    def _capture(self, key: GraphKey, place: Place) -> bool:
        if key in self._graphs or key in self.refused or not self._captures:
            return False
        self._synchronize()
        if not self._graphs:  # torch takes no pool again whose graphs are all gone
            self._pool = _new_pool(self._model.device)
        before = self._used_bytes() - self.shared_bytes
        try:
            graph = self._made(key, place)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self.refused[key] = str(error)
            return False
        self._synchronize()
        taken = self._used_bytes() - self.shared_bytes - before
        self._graphs[key] = _Held(graph, max(taken, 0))
        self._eager.pop(key, None)
        self._forget_choices()
        return True

    def _mixed_key(self, rows: int, longest: int) -> GraphKey | None:
        """The bucket of a mixed forward; None: it has no graph."""
        if not self._captures or self._mixed is None:
            return None
        bucket = padded_rows(rows)
        if bucket not in mixed_rows(self._mixed.max_rows):
            return None
        return GraphKey(0, bucket, context_bucket(longest, self._max_context), mixed=True)

    def _made(self, key: GraphKey, place: Place) -> DecodeGraph | MixedGraph:
        if not key.mixed:
            return self._make(key, place, capture=True)
        assert self._mixed is not None
        return MixedGraph(
            self._model, self._mixed, key.batch, key.context, plan_memory=self.plans,
            scratch=self.scratch, pool=self._pool, stream=self._stream,
        )  # fmt: skip

    def _make(self, key: GraphKey, place: Place, *, capture: bool) -> DecodeGraph:
        return DecodeGraph(
            self._model,  # type: ignore[arg-type]
            self._state.inputs(self._state.first_slot, key.batch),
            self._caches,
            max_kv_len=key.context,
            partition=self._partition(place),
            activations=self.activations,
            num_sms=self._num_sms,
            pool=self._pool,
            plan_memory=self.plans,
            scratch=self.scratch,
            stream=self._stream,
            capture=capture,
        )

    def _plan_shape(self, key: GraphKey) -> AttentionShape:
        config = self._model.config
        return AttentionShape(
            batch=key.batch,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=self._caches[0][0].shape[1],
            max_q_len=1,
            max_kv_len=key.context,
            max_tokens=key.batch,
            max_total_kv=key.batch * key.context,
        )

    def _evict(self, made: int = 1) -> None:
        """Destroy those unused longest, but for the last that were made, until the rest is under
        the limit; nothing runs now."""
        while self.num_bytes > self._limit_bytes and len(self._graphs) > made:
            self._drop(next(iter(self._graphs)))

    def _drop(self, key: GraphKey) -> None:
        self._graphs.pop(key).graph.close()
        self._forget_choices()

    def _used_bytes(self) -> int:
        """Device memory in use, but for what torch keeps for later."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._model.device)
        return int(total - free)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory lacked: torch's allocator has an error for it, the driver, which makes a
    graph's nodes and loads kernels, has words."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _new_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
