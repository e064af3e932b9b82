"""A decode step as one CUDA graph on a partition, with inputs that advance on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.models.activations import ActivationBuffers
from smkern.models.layered import LayeredModel, forward
from smkern.models.plan_memory import PlanMemory
from smkern.models.step import Caches, Step
from smkern.ops import sample
from smkern.ops.workspace import Scratch
from smkern.partition import Partition

WARMUP_RUNS = 2
"""The first loads kernels; the second runs as replays will, from workspaces that are there."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """What a decode graph reads, by request; written in place between replays.

    A row that is `finished` is not appended to, has no keys and emits `pad_token`; so are all rows
    at first. A replay gives `token_ids` the drawn tokens and lengthens `kv_lens` of rows that were
    not finished, so graphs can be replayed back to back: then `page_table` must hold the pages of
    all tokens to come.

    Attributes:
        token_ids: [batch] int32: each request's last token, which is not in the cache yet.
        kv_lens: [batch] int32: its tokens, that one included.
        page_table: [batch, max_pages] int32.
        finished: [batch] bool.
        max_lengths: [batch] int32: a request that gets so many tokens, its prompt's included, is
            finished; at most the graph's max_kv_len + 1.
        stop_tokens: [batch, n] int32, -1 for none: a request that draws one is finished.
        temperature: [batch] fp32; 0 is greedy.
        top_k: [batch] int32; 0 keeps all.
        top_p: [batch] fp32; 1 keeps all.
        min_p: [batch] fp32; 0 keeps all.
        seeds: [batch] int64. The random number of a token follows from its request's seed and from
            how many tokens are before it, whatever the batch.
    """

    token_ids: Tensor
    kv_lens: Tensor
    page_table: Tensor
    finished: Tensor
    max_lengths: Tensor
    stop_tokens: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    @classmethod
    def make(
        cls, batch: int, page_table: Tensor, *, max_kv_len: int, max_stop_tokens: int = 4
    ) -> DecodeInputs:
        """Inputs of which every row is finished, on the page table's device.

        Args:
            batch: Requests.
            page_table: [batch, max_pages] int32, kept; for instance rows of a pool's tables.
            max_kv_len: What `max_lengths` begins with.
            max_stop_tokens: Stop tokens of a request.

        Raises:
            ArgumentError: a page table of another shape or dtype.
        """
        if page_table.dim() != 2 or page_table.shape[0] != batch:
            raise ArgumentError(
                f"page_table has shape {list(page_table.shape)}, wanted [{batch}, max_pages]: pass "
                "a row a request"
            )
        if page_table.dtype is not torch.int32:
            raise ArgumentError(f"page_table is {page_table.dtype}, wanted torch.int32: convert it")
        device = page_table.device

        def full(value: float, dtype: torch.dtype, *more: int) -> Tensor:
            return torch.full((batch, *more), value, dtype=dtype, device=device)

        return cls(
            token_ids=full(0, torch.int32),
            kv_lens=full(0, torch.int32),
            page_table=page_table,
            finished=full(True, torch.bool),
            max_lengths=full(max_kv_len, torch.int32),
            stop_tokens=full(-1, torch.int32, max(max_stop_tokens, 1)),
            temperature=full(0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(1, torch.float32),
            min_p=full(0, torch.float32),
            seeds=full(0, torch.int64),
        )

    def draw(
        self, logits: Tensor, steps: Tensor, *, pad_token: int = 0, num_sms: int | None = None
    ) -> None:
        """Draw a token a row into `token_ids`; `kv_lens` and `finished` go on with it.

        Rows that are finished keep all they have.

        Args:
            logits: [batch, vocab].
            steps: [batch] int32: the tokens in front of the one that is drawn.
            pad_token: What a finished row draws.
            num_sms: SMs to use at most.
        """
        sample(
            logits,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
            steps=steps,
            finished=self.finished,
            lengths=self.kv_lens,
            max_lengths=self.max_lengths,
            stop_tokens=self.stop_tokens,
            pad_token=pad_token,
            out=self.token_ids,
            num_sms=num_sms,
        )


class DecodeGraph:
    """One decode step of a batch: plan, embed, layers, head and sample, captured once.

    A replay allocates nothing and loads nothing. The graph runs on its partition, whatever stream
    launches it. On a CPU decoder nothing is captured and a replay runs the operators.

    Args:
        decoder: The model.
        inputs: Static inputs; they and the caches keep their addresses.
        caches: A (k_cache, v_cache) a layer.
        max_kv_len: No request gets more tokens; attention's plan is sized by it.
        max_total_kv: All requests together get no more, for instance the tokens that a pool holds;
            a tight one makes the plan small. None: batch * max_kv_len.
        partition: Where it runs. None: on the whole device.
        activations: Buffers that graphs which never run at the same time may share. None: its own.
        pad_token: What a finished row draws.
        num_sms: SMs of every operator, below the partition's.
        pool: A memory pool of torch's graphs to share.
        plan_memory: Of attention's plan; graphs that never run at the same time may share it. None:
            of its own.
        scratch: Workspaces of its operators; graphs that never run at the same time may share
            them. None: of its own.
        stream: Where it is captured on the whole device. None: a stream of its own.
        capture: Whether there is a graph; otherwise a replay runs the operators, as on a CPU.

    Attributes:
        inputs: As given.
        logits: [batch, vocab_size] of the last replay.
        step: What is captured; its `kv_lens` are 0 for finished rows.

    Raises:
        ArgumentError: inputs, caches or numbers that do not fit.
        BudgetError: `num_sms` above the partition's.

    Example:
        >>> inputs = DecodeInputs.make(64, tables, max_kv_len=4096)            # doctest: +SKIP
        >>> graph = DecodeGraph(decoder, inputs, caches, max_kv_len=4096,
        ...                     partition=split.decode)                        # doctest: +SKIP
        >>> graph.replay()                                                     # doctest: +SKIP
        >>> graph.inputs.token_ids                  # the tokens drawn          # doctest: +SKIP
    """

    def __init__(
        self,
        decoder: LayeredModel,
        inputs: DecodeInputs,
        caches: Caches,
        *,
        max_kv_len: int,
        max_total_kv: int | None = None,
        partition: Partition | None = None,
        activations: ActivationBuffers | None = None,
        pad_token: int = 0,
        num_sms: int | None = None,
        pool: Any = None,
        plan_memory: PlanMemory | None = None,
        scratch: Scratch | None = None,
        stream: Any = None,
        capture: bool = True,
    ) -> None:
        batch = inputs.token_ids.shape[0]
        if activations is None:
            activations = ActivationBuffers(decoder.config, batch, batch, decoder.device)
        self.decoder = decoder
        self.inputs = inputs
        self.partition = partition
        self.pad_token = pad_token
        self._scratch = scratch  # the graph has its addresses
        self._no_keys = torch.zeros((), dtype=torch.int32, device=decoder.device)
        step = Step.make(
            activations,
            token_ids=inputs.token_ids,
            kv_lens=torch.zeros_like(inputs.kv_lens),
            page_table=inputs.page_table,
            caches=caches,
            max_kv_len=max_kv_len,
            max_total_kv=max_total_kv,
            num_sms=num_sms,
        )
        # made on the current stream: a partition does not close while its stream owns tensors
        budget = num_sms if num_sms is not None or partition is None else partition.num_sms
        if plan_memory is None:
            self.step = step.planned(num_sms=budget)
        else:
            self.step = step.planned_in(plan_memory, budget)
        self.logits = self.step.buffers.logits
        self._graph: Any = None
        self._is_eager = decoder.device.type == "cpu" or not capture
        if not self._is_eager:
            self._capture(pool, stream)

    @property
    def batch(self) -> int:
        return self.step.batch

    def replay(self, count: int = 1, *, into: Tensor | None = None) -> None:
        """Launch `count` steps back to back; returns without waiting.

        In a partition they are ordered by the partition's stream, else by the current one.

        Args:
            count: Steps.
            into: [count, batch] int32, on the device or pinned: row i gets step i's tokens.

        Raises:
            ArgumentError: an `into` of another shape, or a graph that is closed.
            PartitionError: the partition is closed.
        """
        if into is not None and into.shape != (count, self.batch):
            raise ArgumentError(
                f"into has shape {list(into.shape)}, wanted [{count}, {self.batch}]: a row a step"
            )
        run = self._launcher()
        for index in range(count):
            run()
            if into is not None:
                with self._place():
                    into[index].copy_(self.inputs.token_ids, non_blocking=True)

    def close(self) -> None:
        """Destroy the graph; its last replay must have finished. Closing twice is fine."""
        if self._graph is None:
            return
        if self.partition is None:
            self._graph.reset()
        else:
            self._graph.close()
        self._graph = None

    def run_eagerly(self) -> None:
        """The step as single launches on the current stream."""
        with nullcontext() if self._scratch is None else self._scratch.on():
            self._run()

    def _run(self) -> None:
        step, inputs = self.step, self.inputs
        # a finished row has no keys: nothing is read for it, nor written into pages it gave back
        torch.where(inputs.finished, self._no_keys, inputs.kv_lens, out=step.kv_lens)
        step.planned(out=step.plan)
        logits = forward(self.decoder, step)
        inputs.draw(logits, step.kv_lens, pad_token=self.pad_token, num_sms=step.num_sms)

    def _place(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.partition is None else self.partition

    def _launcher(self) -> Callable[[], None]:
        if self._is_eager:
            return self.run_eagerly
        if self._graph is None:
            raise ArgumentError("this graph is closed: capture another")
        if self.partition is None:
            return self._graph.replay
        partition, graph = self.partition, self._graph
        return lambda: partition.launch(graph)

    def launch(self) -> None:
        """Launch one step on the current stream; a graph of a partition runs there all the same.

        Raises:
            ArgumentError: a graph that is closed.
            PartitionError: its partition is closed.
        """
        if self._is_eager:
            self.run_eagerly()
        elif self._graph is None:
            raise ArgumentError("this graph is closed: capture another")
        else:
            self._graph.replay()

    def _capture(self, pool: Any, stream: Any) -> None:
        """Load every kernel by running with rows put aside as finished, then capture."""
        device, partition = self.decoder.device, self.partition
        inputs = self.inputs
        if partition is not None:
            # the device's own wait may end before a graph on this stream that writes these inputs
            partition.stream.synchronize()
        kept = inputs.finished.clone(), inputs.token_ids.clone()
        inputs.finished.fill_(True)
        torch.cuda.synchronize(device)
        if partition is not None:
            stream = partition.stream
        elif stream is None:
            stream = torch.cuda.Stream(device)
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_RUNS):
                    self.run_eagerly()
            stream.synchronize()
            if partition is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    self.run_eagerly()
            else:
                with partition.capture(pool) as self._graph:
                    self.run_eagerly()
        finally:  # also where there is no memory for a graph: the rows serve others
            inputs.finished.copy_(kept[0])
            inputs.token_ids.copy_(kept[1])
            torch.cuda.synchronize(device)
