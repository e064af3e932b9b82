"""Runs a model's launches: on a GPU's partitions and graphs, or on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from smkern.errors import ArgumentError
from smkern.kv import KvPool
from smkern.latency import Size
from smkern.limits import shown
from smkern.models.layered import LayeredModel
from smkern.ops.checks import as_int
from smkern.partition import Ladder
from smkern.runtime.device import Device, Work
from smkern.runtime.executor import Draw, Executor, MemoryReport, PrefillChunk, PrefillRun
from smkern.runtime.host_device import HostDevice
from smkern.runtime.model import sizes
from smkern.runtime.model.decode_slots import DecodeBatch, DecodeSlots
from smkern.runtime.model.graphs import MIB, GraphCache
from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.model.mixed import LayerDone, MixedRunner
from smkern.runtime.model.mixed_graph import MixedInputs
from smkern.runtime.model.prefill import PrefillBuffers, PrefillRunner, prompt_activations
from smkern.runtime.model.reads import Read, Reads, Source
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.row_updates import RowUpdate
from smkern.runtime.model.warming import EmptyForwards, warm_prompts
from smkern.runtime.options import check_parts
from smkern.runtime.place import Place
from smkern.runtime.request import Request

GRAPH_LIMIT_BYTES = 1024 * MIB
"""Default limit of the memory of decode graphs and their pool."""
DECODE_LAUNCHES = 4
"""Launches of a decode step: changed rows (a copy and a kernel), the graph, the copy of tokens."""


class _Prepared(NamedTuple):
    """Decode steps that were prepared while the device computed those before.

    `at`: Steps of this arrangement that were launched before them.
    """

    decoding: DecodeBatch
    at: int
    works: list[tuple[Work, Draw]]


class ModelExecutor(Executor):
    """Decode graphs, prompts a group of layers at a time, and both in one forward.

    All buffers are made here and stay where they are. Requests that decode have slots; what
    changes between launches (slots, pages, the numbers of prompts) is sent with the
    launch that needs it, and nothing that a launch draws is needed on the host for the next.

    Args:
        model: The model; a `Decoder` is one.
        pool: Its pages, on its device.
        ladder: The splits; they stay open until the executor is closed. None: the whole device
            alone.
        device: What to launch on. None: made of the ladder, or for CPU tensors this process.
        max_running: Requests that decode at a time.
        max_prefill: Requests of a prefill batch, or chunks of a mixed forward.
        max_tokens: New tokens of one of these.
        max_context: Tokens of a request. None: the model's context.
        num_sms: SMs of every operator. None: all that its stream's partition has.
        graph_limit_bytes: Limit of the memory of decode graphs.
        partition_bytes: What the ladder took of the device, for the report.

    Attributes:
        device, config, pool, max_running, max_prefill, max_tokens, max_context: As `Executor` has
            them.
        graphs: The decode graphs.

    Raises:
        ArgumentError: sizes that cannot be, or a pool of another device or model.

    Source: layer-wise prefill beside decode graphs, MuxWise section 3.2; k graphs without a wait,
        DuetServe section 4.3.

    Example:
        >>> with smkern.ladder([32, 64]) as ladder:                            # doctest: +SKIP
        ...     executor = ModelExecutor(decoder, pool, ladder=ladder)
        ...     executor.warm()
    """

    def __init__(
        self,
        model: LayeredModel,
        pool: KvPool,
        *,
        ladder: Ladder | None = None,
        device: Device | None = None,
        max_running: int = 128,
        max_prefill: int = 16,
        max_tokens: int = 8192,
        max_context: int | None = None,
        num_sms: int | None = None,
        graph_limit_bytes: int = GRAPH_LIMIT_BYTES,
        partition_bytes: int = 0,
    ) -> None:
        check_parts(model=model, pool=pool, **{} if device is None else {"device": device})
        config = model.config
        self.max_running = as_int("max_running", max_running, 1)
        self.max_prefill = as_int("max_prefill", max_prefill, 1)
        self.max_tokens = as_int("max_tokens", max_tokens, 1)
        positions = model.max_position
        wanted = positions if max_context is None else max_context
        self.max_context = as_int("max_context", wanted, 1, positions)
        _check_pool(pool, model)
        self._model = model
        self._partition_bytes = partition_bytes
        self.config = config
        self.pool = pool
        self.device: Device = device if device is not None else _device_for(model, ladder)
        # Batches and mixed steps have prefill rows of their own: a mixed step's move to slots
        # on the decode lane while the next batch is written on the prefill lane.
        self._state = RowState.make(
            max_running=max_running,
            max_prefill=2 * max_prefill,
            max_pages=pool.pages_for(self.max_context),
            device=model.device,
        )
        self._table = InputBatch(self._state, pool, in_order=True)
        self._decode_slots = DecodeSlots(self._table)
        self._prepared: _Prepared | None = None
        slots = self._state.inputs(self._state.first_slot, max_running)
        self._tokens = slots.token_ids
        self._prefill_table = InputBatch(self._state, pool)
        caches = self._caches = [pool.layer(i) for i in range(config.num_layers)]
        self._activations = prompt_activations(
            config, model.device, max_running, max_prefill, max_tokens
        )
        self._slots = [
            PrefillBuffers(activations, (1 - slot) * max_prefill, max_tokens, max_prefill, num_sms)
            for slot, activations in enumerate(self._activations)
        ]
        self._reads = Reads(model.device, 2 * max_prefill + max_running)
        self._prefill = PrefillRunner(
            model, caches, self._state, self._prefill_table, self._slots, self._reads,
            self.max_context,
        )  # fmt: skip
        self._inputs = MixedInputs(
            self._state, caches, self._activations[0], max_tokens, self.max_context, num_sms
        )
        self.graphs = GraphCache(
            model,
            self._state,
            caches,
            partition=self.device.partition,
            synchronize=self.synchronize,
            max_context=self.max_context,
            num_sms=num_sms,
            limit_bytes=graph_limit_bytes,
            mixed=self._inputs,
        )
        self._mixed = MixedRunner(model, self._inputs, self._state, self._slots[0], self.graphs)
        self.synchronize()  # the buffers are made on this stream, and used on others

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        """Prepare a batch of prompts; nothing is launched. A slot holds one batch at a time.

        Raises:
            ArgumentError: more chunks or tokens than fit, or a slot that is not free.
        """
        self._check_chunks(chunks)
        return self._prefill.begin(chunks, slot)

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        """Layers first..first+count of a batch; see `Executor`.

        Raises:
            ArgumentError: layers that the model has not, or a batch that is gone.
        """
        return self._prefill.prefill(run, first, count)

    def decode(self, requests: Sequence[Request], steps: int) -> list[tuple[Work, Draw]]:
        """Decode steps of these requests, a work each; see `Executor`.

        Raises:
            ArgumentError: more requests than rows, or pages that are not there.
        """
        if not requests or steps < 1:
            return []
        found, self._prepared = self._prepared, None
        if (
            found is not None
            and self._decode_slots.stays(found.decoding)
            and (found.at, len(found.works)) == (found.decoding.steps, steps)
            and found.decoding.requests == tuple(requests)
        ):
            return found.works
        decoding = self._decode_slots.arrange(requests, steps)
        return self._steps(decoding, self._table.take(), steps)

    def prepare_next(self, requests: Sequence[Request], steps: int) -> None:
        """The next decode steps are of the same requests as the last, and have their pages: they
        are prepared while the device computes, and `decode` returns them if it is asked for them.

        The rows hear of their pages at once, behind the last step and in front of all that comes
        on the decode lane. Nothing is undone where the steps are dropped: only entries of the page
        table are written, for pages behind all that the row has computed. A request that leaves
        meanwhile gives its pages back, and they may be another's before the entries are written;
        but an update that ends the row, or puts another there, is in front of all that reads it.
        """
        self._prepared = None
        decoding = self._decode_slots.go_on(tuple(requests), steps)
        if decoding is None:
            return
        update = self._table.take()
        self._prepared = _Prepared(decoding, decoding.steps, self._steps(decoding, update, steps))
        if update.has_any:
            # What was not sent goes with the next step, which says so if it cannot be.
            with suppress(Exception):
                self.device.behind("decode", update.send)

    def mixed(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[Request]
    ) -> tuple[Work, Draw]:
        """One forward of prompts' chunks and a token of each decoding request; see `Executor`.

        Raises:
            ArgumentError: more than fits, or a batch of prefill slot 0 that has layers to go.
        """
        self._check_chunks(chunks)
        if self._slots[0].is_busy:
            raise ArgumentError(
                "prefill slot 0 holds a batch that has layers to go, and a mixed forward needs its "
                "buffers: launch its layers first"
            )
        decoding = self._decode_slots.arrange(requests, 1)
        rows, lengths = decoding.rows, decoding.lengths
        first = self._state.first_slot - len(chunks)
        self._table.write_prefill_rows(first, chunks)
        self._decode_slots.drop_prefill_rows()  # their rows are these
        update = self._table.take()
        drawing = [i for i, chunk in enumerate(chunks) if chunk.draws]
        picked = [*drawing, *range(len(chunks), len(chunks) + len(rows))]
        read = Read(self._reads, picked)
        kept = tuple(chunks)

        def launch(place: Place, behind: LayerDone | None) -> None:
            self._mixed.run(place, kept, lengths, update, read, behind)
            decoding.advance()
            for i in drawing:
                self._decode_slots.drew(kept[i].request, first + i)

        work = self._mixed.work(launch, kept, lengths)
        return work, Draw((*(kept[i].request for i in drawing), *rows), read)

    def ready_rungs(self, batch: int, longest: int) -> tuple[int | None, ...] | None:
        return self.graphs.ready(batch, longest)

    def forget(self, request: Request) -> None:
        self._decode_slots.forget(request)
        self._prefill.forget(request)

    def capture(
        self,
        rungs: Iterable[int | None] | None = None,
        batches: Iterable[int] | None = None,
        contexts: Iterable[int] | None = None,
    ) -> int:
        """Capture graphs ahead, of mixed forwards too if the whole device is asked for; waits for
        the device. On a CPU there are none.

        Args:
            rungs: None in it is the whole device. None: that, and all of the ladder.
            batches: Decode rows that must be served. None: every bucket.
            contexts: Keys of a request that must be served. None: `max_context`.

        Returns:
            How many were captured.
        """
        asked = [None, *self.device.rungs] if rungs is None else list(rungs)
        places = [Place.of("decode", rung, self.device.num_sms) for rung in asked]
        wanted = range(1, self.max_running + 1) if batches is None else batches
        lengths = list(contexts or [self.max_context])
        count = 0
        if None in asked:  # first: their plan is the largest, and decode steps share its memory
            count = self.graphs.capture_mixed(sizes.mixed_rows(self._inputs.max_rows), lengths)
        return count + self.graphs.capture(places, wanted, lengths)

    def warm(self) -> None:
        """Run empty prompts wherever prompts run; waits for the device.

        What a launch's first time costs (kernels that are loaded, workspaces that grow) is paid
        here, and not on a partition's stream while it serves. Sizes between those that run here
        may still load a kernel: `smkern.warmup(calls=[ModelCalls(...)], budgets=[...])` loads all.
        Nothing may run or wait.
        """
        self._prefill.warm()
        self._inputs.reserve()
        self.synchronize()
        forwards = [
            EmptyForwards(self._model, self._state, self._caches, slot, self.max_prefill)
            for slot in self._slots
        ]
        warm_prompts(self.device, self.max_tokens, self.max_running, forwards)

    def idle(self) -> None:
        """Nothing runs or waits: capture the graphs that were missed."""
        self.graphs.capture_missed()

    def memory_report(self) -> MemoryReport:
        graphs = self.graphs
        buffers = self._inputs.num_bytes + sum(slot.num_bytes for slot in self._slots)
        rows = self._table.nbytes + self._prefill_table.nbytes - self._state.nbytes
        return MemoryReport(
            graphs=len(graphs),
            graph_bytes=graphs.num_bytes,
            shared_bytes=graphs.shared_bytes,
            partition_bytes=self._partition_bytes,
            activation_bytes=sum(x.num_bytes for x in (*self._activations, graphs.activations)),
            state_bytes=rows + buffers,
            kv_bytes=self.pool.storage.nbytes,
            by_graph=graphs.by_graph,
            refused={str(key): words for key, words in graphs.refused.items()},
        )

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self.device.synchronize()

    def close(self) -> None:
        """Wait for all that was launched, and destroy the graphs. Closing twice is fine."""
        self._prepared = None
        with suppress(RuntimeError):  # behind an error of the device nothing runs
            self.synchronize()
        self.graphs.close()

    def _steps(
        self, decoding: DecodeBatch, update: RowUpdate, steps: int
    ) -> list[tuple[Work, Draw]]:
        """The next decode steps of an arrangement, the first behind what is sent of its rows."""
        rows, batch = decoding.rows, len(decoding.rows)
        longest, total, layers = decoding.longest, decoding.total, self.config.num_layers
        source = Source.of(self._tokens[:batch])
        works: list[tuple[Work, Draw]] = []
        for index in range(steps):
            read = Read(self._reads)
            bound = min(longest + index, self.max_context)

            def launch(place: Place, read: Read = read, bound: int = bound) -> None:
                update.send()
                self.graphs.launch(place, batch, bound)
                read.copy(source)
                decoding.advance()

            size = Size(num_layers=layers, batch=batch, total_kv=total + index * batch)
            works.append((Work("decode", launch, size, DECODE_LAUNCHES), Draw(rows, read)))
        return works

    def _check_chunks(self, chunks: Sequence[PrefillChunk]) -> None:
        tokens = sum(chunk.count for chunk in chunks)
        if not 1 <= len(chunks) <= self.max_prefill or tokens > self.max_tokens:
            raise ArgumentError(
                f"{len(chunks)} chunks of {tokens} tokens: the buffers hold 1 to "
                f"{self.max_prefill} of {self.max_tokens} in all; cut the batch, or raise "
                "max_prefill or max_tokens"
            )


def _check_pool(pool: KvPool, model: LayeredModel) -> None:
    """Raise ArgumentError for a pool whose pages the model's attention cannot use."""
    if pool.device != model.device:
        raise ArgumentError(
            f"the pool is on {pool.device}, the model on {model.device}: make the pool there"
        )
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        has, wanted = getattr(pool.sizes, name), getattr(model.config, name)
        if has != wanted:
            raise ArgumentError(
                f"the pool has {name}={has}, the model {wanted}: make it with the model's sizes"
            )
    dtype = model.config.dtype
    if pool.sizes.dtype not in (dtype, torch.float8_e4m3fn):
        raise ArgumentError(
            f"the pool holds {pool.sizes.dtype}, the model is in {dtype}: make it with that, or "
            f"with {torch.float8_e4m3fn}"
        )


def _device_for(model: LayeredModel, ladder: Ladder | None) -> Device:
    if ladder is not None and not hasattr(ladder, "split"):
        raise ArgumentError(f"ladder={shown(ladder)}: pass smkern.ladder([16, 32]), or None")
    if model.device.type != "cuda":
        return HostDevice()
    from smkern.runtime.cuda_device import CudaDevice

    return CudaDevice(ladder, model.device.index)
