"""Batches of prompts on their way through the layers, a group of layers a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import torch

from smkern.errors import ArgumentError
from smkern.kv import Staging
from smkern.kv.staging import RING
from smkern.latency import Size
from smkern.latency.work import padded_rows
from smkern.models.activations import ActivationBuffers
from smkern.models.config import ModelConfig
from smkern.models.layered import LayeredModel
from smkern.models.plan_memory import PlanMemory
from smkern.models.step import Caches, Step
from smkern.partition import current_num_sms
from smkern.runtime.device import Work
from smkern.runtime.executor import Draw, PrefillChunk, PrefillRun, ids_of_chunks
from smkern.runtime.model import sizes
from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.model.reads import Read, Reads, Source
from smkern.runtime.model.row_state import RowState
from smkern.runtime.place import Place
from smkern.runtime.request import Request


def prompt_activations(
    config: ModelConfig,
    device: torch.device | str,
    max_running: int,
    max_prefill: int,
    max_tokens: int,
) -> list[ActivationBuffers]:
    """Activations of prefill slot 0, which mixed forwards use as well, and of slot 1."""
    return [
        ActivationBuffers(config, padded_rows(tokens), batch, device)
        for tokens, batch in (
            (max_tokens + max_running, max_prefill + max_running),
            (max_tokens, max_prefill),
        )
    ]


def activation_bytes(
    config: ModelConfig, *, max_running: int, max_prefill: int, max_tokens: int
) -> int:
    """Device memory that an executor of these sizes takes for activations, bytes."""
    prompts = prompt_activations(config, "meta", max_running, max_prefill, max_tokens)
    decode = ActivationBuffers(config, max_running, max_running, "meta")
    return sum(x.num_bytes for x in (*prompts, decode))


class PrefillBuffers:
    """The memory of one prefill slot: activations, token ids, attention's plan.

    Work of a slot is launched on one lane, in order, so the next batch may overwrite it all.

    Args:
        first_row: First row of the slot in the row state.
        num_sms: SMs of every operator. None: all that the stream's partition has.
    """

    def __init__(
        self,
        activations: ActivationBuffers,
        first_row: int,
        max_tokens: int,
        max_prefill: int,
        num_sms: int | None = None,
    ) -> None:
        self.activations = activations
        self.first_row = first_row
        self.num_sms = num_sms
        self.token_ids, self.cu_q_lens = (
            torch.zeros(size, dtype=torch.int32, device=activations.device)
            for size in (padded_rows(max_tokens), max_prefill + 1)
        )
        self.plans = PlanMemory(activations.device)
        self.batch: PromptBatch | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a batch has layers to go, whose activations are here."""
        return self.batch is not None and not self.batch.is_done

    @property
    def num_bytes(self) -> int:
        """Device memory beside the activations, bytes."""
        return self.token_ids.nbytes + self.cu_q_lens.nbytes + self.plans.num_bytes


class PromptBatch:
    """A batch of prompts in a slot: what is sent with its first launch, and how far it is.

    Attributes:
        is_done: Whether its last layer was launched, or it was forgotten.
    """

    def __init__(
        self,
        prompts: PrefillBuffers,
        requests: Iterable[Request],
        step: Step,
        sends: Sequence[Callable[[], object]],
    ) -> None:
        self.prompts = prompts
        self.is_done = False
        self._requests = set(requests)
        self._step = step
        self._sends = sends
        self._num_sms: int | None = None

    def forget(self, request: Request) -> None:
        """A request has left; done when all have."""
        self._requests.discard(request)
        self.is_done = self.is_done or not self._requests

    def step(self) -> Step:
        """The step, planned for the current stream; tokens and rows are sent the first time."""
        for send in self._sends:
            send()
        self._sends = ()
        num_sms = 0
        if self._step.kv_lens.device.type == "cuda":
            num_sms = current_num_sms(self._step.kv_lens.device.index)
        if self._num_sms != num_sms:  # the batch has moved: the plan deals to other SMs
            self._step = self._step.planned_in(self.prompts.plans)
            self._num_sms = num_sms
        return self._step


def reserve(staging: Staging, room: torch.Tensor) -> None:
    """Take pinned memory for a send of so many numbers and some more, for all sends of the ring."""
    zeros = [0] * room.numel()
    for _ in range(RING):
        staging.send([(room, zeros), (room, zeros)])


class PrefillRunner:
    """Prepares batches of prompts and their groups of layers.

    Args:
        table: The rows of prefill batches alone: its updates are sent on the prefill lane.
    """

    def __init__(
        self,
        model: LayeredModel,
        caches: Caches,
        state: RowState,
        table: InputBatch,
        slots: Sequence[PrefillBuffers],
        reads: Reads,
        max_context: int,
    ) -> None:
        self._model = model
        self._config = model.config
        self._caches = caches
        self._state = state
        self._table = table
        self._slots = slots
        self._reads = reads
        self._max_context = max_context
        self._layer_launches = sizes.layer_launches(model.config, summed=sizes.is_summed(model))
        self._staging = Staging(state.device)

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        """Prepare a batch; nothing is launched.

        Raises:
            ArgumentError: a slot whose batch has layers to go, or chunks that do not fit.
        """
        prompts = self._slots[slot]
        if prompts.is_busy:
            raise ArgumentError(
                f"prefill slot {slot} holds a batch that has layers to go: launch them, or forget "
                "its requests"
            )
        counts = [chunk.count for chunk in chunks]
        lengths = [chunk.end for chunk in chunks]
        self._table.write_prefill_rows(prompts.first_row, chunks)
        tokens = ids_of_chunks(chunks)
        cu_q_lens = prompts.cu_q_lens[: len(chunks) + 1]
        inputs = self._state.inputs(prompts.first_row, len(chunks))
        step = Step.make(
            prompts.activations,
            token_ids=prompts.token_ids[: padded_rows(len(tokens))],
            kv_lens=inputs.kv_lens,
            page_table=inputs.page_table,
            caches=self._caches,
            cu_q_lens=cu_q_lens,
            num_sms=prompts.num_sms,
            **sizes.bounds(counts, lengths, self._max_context),
        )
        writes = [
            (prompts.token_ids[: len(tokens)], tokens),
            (cu_q_lens, [0, *accumulate(counts)]),
        ]
        sends = (self._table.take().send, partial(self._staging.send, writes))
        batch = PromptBatch(prompts, [chunk.request for chunk in chunks], step, sends)
        prompts.batch = batch
        return PrefillRun(tuple(chunks), slot, batch)

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        """Layers first..first+count of a batch, with what is in front of the first layer, and with
        the head and the draws behind the last.

        Raises:
            ArgumentError: layers that the model has not, or a batch that is gone.
        """
        config = self._config
        batch: PromptBatch = run.state
        if not 0 <= first < first + count <= config.num_layers:
            raise ArgumentError(
                f"layers {first} to {first + count} of {config.num_layers}: give at least one, "
                "of those that the model has"
            )
        if self._slots[run.slot].batch is not batch:
            raise ArgumentError(f"the batch of prefill slot {run.slot} is gone: begin it anew")
        is_last = first + count == config.num_layers
        drawing = [row for row, chunk in enumerate(run.chunks) if chunk.draws]
        read = None
        if is_last and drawing:
            read = Read(self._reads, drawing)
            run.draw = Draw(tuple(run.chunks[row].request for row in drawing), read)

        def launch(place: Place) -> None:
            step = batch.step()
            if first == 0:
                self._model.embed(step)
            for index in range(first, first + count):
                self._model.layer(index, step)
            if is_last:
                batch.is_done = True
            if read is not None:
                rows = self._state.inputs(batch.prompts.first_row, len(run.chunks))
                rows.draw(self._model.head(step), step.kv_lens, num_sms=step.num_sms)
                read.copy(Source.of(rows.token_ids))

        return Work(
            "prefill",
            launch,
            Size(run.cost, count, config.num_layers, read is not None),
            count * self._layer_launches + (first == 0) * 5 + is_last * 8,
            {"first": first, "requests": [chunk.request.index for chunk in run.chunks]},
        )

    def warm(self) -> None:
        """Take the pinned memory of the longest batch, as often as several are on their way."""
        reserve(self._staging, self._slots[0].token_ids)

    def forget(self, request: Request) -> None:
        """A batch whose requests are all forgotten goes no further; its slot is free."""
        for prompts in self._slots:
            if prompts.batch is not None and prompts.is_busy:
                prompts.batch.forget(request)
        self._table.forget(request)
