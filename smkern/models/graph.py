"""A decode step as one CUDA graph on a partition; its inputs advance on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.models.activations import ActivationBuffers
from smkern.models.layered import LayeredModel, all_layers, warming_layers
from smkern.models.plan_memory import PlanMemory
from smkern.models.step import Caches, Step
from smkern.ops import sample
from smkern.ops.workspace import Scratch
from smkern.partition import Partition

STOP_TOKENS = 4
"""Stop tokens of a request, in inputs that `DecodeInputs.make` makes."""


def captured(
    run: Callable[[], None],
    device: torch.device,
    *,
    warm: Callable[[], None] | None = None,
    partition: Partition | None = None,
    pool: Any = None,
    stream: Any = None,
) -> Any:
    """What `run` launches as a graph, captured behind a run that loads its kernels.

    Args:
        run: Launches on the current stream.
        device: Where.
        warm: Launches each kernel of `run`, with workspaces as large; None: `run` does.
        partition: Where the graph runs. None: on the whole device.
        pool: Memory pool of torch's graphs to capture in.
        stream: Stream to capture on without a partition. None: a new one.
    """
    if partition is not None:
        stream = partition.stream
    elif stream is None:
        stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        (warm or run)()
    stream.synchronize()
    if partition is not None:
        with partition.capture(pool) as confined:
            run()
        return confined
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """The inputs of a decode graph, a row per request; written in place between replays.

    A row that is `finished` reads and writes no keys and draws 0; all rows start so. A replay puts
    the drawn tokens into `token_ids` and lengthens `kv_lens` of the other rows, so graphs can be
    replayed back to back; `page_table` must then hold the pages of all tokens to come.

    Attributes:
        token_ids: [batch] int32: each request's last token, which is not in the cache yet.
        kv_lens: [batch] int32: its tokens, that one included.
        page_table: [batch, max_pages] int32.
        finished: [batch] bool.
        max_lengths: [batch] int32: a request of so many tokens, prompt included, is finished; at
            most the graph's max_kv_len + 1.
        stop_tokens: [batch, n] int32, -1 for none: drawing one of them finishes the request.
        temperature: [batch] fp32; 0 is greedy.
        top_k: [batch] int32; 0 keeps all.
        top_p: [batch] fp32; 1 keeps all.
        min_p: [batch] fp32; 0 keeps all.
        seeds: [batch] int64. A token's random number depends on its request's seed and on how
            many tokens are before it, not on the batch.
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
    def make(cls, batch: int, page_table: Tensor, *, max_kv_len: int) -> DecodeInputs:
        """Inputs whose rows are all finished, on the page table's device.

        Args:
            batch: Requests.
            page_table: [batch, max_pages] int32; not copied.
            max_kv_len: Initial value of `max_lengths`.

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
            stop_tokens=full(-1, torch.int32, STOP_TOKENS),
            temperature=full(0, torch.float32),
            top_k=full(0, torch.int32),
            top_p=full(1, torch.float32),
            min_p=full(0, torch.float32),
            seeds=full(0, torch.int64),
        )

    def draw(self, logits: Tensor, steps: Tensor, *, num_sms: int | None = None) -> None:
        """Draw a token per row into `token_ids`, and update `kv_lens` and `finished`.

        Finished rows do not change.

        Args:
            logits: [batch, vocab].
            steps: [batch] int32: tokens before the one that is drawn.
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
            out=self.token_ids,
            num_sms=num_sms,
        )


class DecodeGraph:
    """One decode step of a batch: plan, embed, layers, head and sample, captured once.

    A replay allocates and loads nothing. The graph runs on its partition, whatever stream launches
    it. For a model on a CPU nothing is captured, and a replay calls the operators.

    Args:
        decoder: The model.
        inputs: Static inputs; they and the caches keep their addresses.
        caches: (k_cache, v_cache) of each layer.
        max_kv_len: Tokens of a request, at most; attention's plan is sized by it.
        partition: Where it runs. None: on the whole device.
        activations: Activation buffers, shared by graphs that never run at the same time. None:
            its own.
        num_sms: SMs of every operator. None: all of the partition.
        pool: Memory pool of torch's graphs to capture in.
        plan_memory: Memory of attention's plan, shared as `activations`. None: its own.
        scratch: Workspaces of its operators, shared as `activations`. None: its own.
        stream: Stream to capture on without a partition. None: a new one.
        capture: Whether to capture; otherwise a replay calls the operators, as on a CPU.

    Attributes:
        inputs: As given.
        logits: [batch, vocab_size] of the last replay.
        step: The step that is captured; its `kv_lens` are 0 for finished rows.

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
        partition: Partition | None = None,
        activations: ActivationBuffers | None = None,
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
        self._scratch = scratch  # kept: the graph has its addresses
        self._no_keys = torch.zeros((), dtype=torch.int32, device=decoder.device)
        step = Step.make(
            activations,
            token_ids=inputs.token_ids,
            kv_lens=torch.zeros_like(inputs.kv_lens),
            page_table=inputs.page_table,
            caches=caches,
            max_kv_len=max_kv_len,
            num_sms=num_sms,
        )
        # Made on the current stream: a partition does not close while its stream owns tensors.
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
        for index in range(count):
            with nullcontext() if self.partition is None else self.partition:
                self.launch()
                if into is not None:
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

    def run_eagerly(self, layers: Callable[[LayeredModel, Step], None] = all_layers) -> None:
        """The step as single launches on the current stream."""
        with nullcontext() if self._scratch is None else self._scratch.on():
            self._run(layers)

    def _run(self, layers: Callable[[LayeredModel, Step], None]) -> None:
        step, inputs = self.step, self.inputs
        # A finished row has no keys: it must not write into pages that it gave back.
        torch.where(inputs.finished, self._no_keys, inputs.kv_lens, out=step.kv_lens)
        step.planned(out=step.plan)
        layers(self.decoder, step)
        inputs.draw(self.decoder.head(step), step.kv_lens, num_sms=step.num_sms)

    def launch(self) -> None:
        """Launch one step on the current stream; it still runs on the graph's partition.

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
        """Load every kernel by running with all rows finished, then capture."""
        device, partition = self.decoder.device, self.partition
        inputs = self.inputs
        if partition is not None:
            # Waiting for the device may end before a graph on this stream, which writes the inputs.
            partition.stream.synchronize()
        kept = inputs.finished.clone(), inputs.token_ids.clone()
        inputs.finished.fill_(True)
        torch.cuda.synchronize(device)
        try:
            self._graph = captured(
                self.run_eagerly, device, warm=partial(self.run_eagerly, warming_layers),
                partition=partition, pool=pool, stream=stream,
            )  # fmt: skip
        finally:  # also without memory for a graph: other graphs read the same rows
            inputs.finished.copy_(kept[0])
            inputs.token_ids.copy_(kept[1])
            torch.cuda.synchronize(device)
