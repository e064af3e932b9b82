"""The layers of a mixed forward as one CUDA graph, and the inputs that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from smkern.kv import Staging
from smkern.latency.work import padded_rows
from smkern.models.activations import ActivationBuffers
from smkern.models.graph import captured
from smkern.models.layered import LayeredModel, all_layers, warming_layers
from smkern.models.plan_memory import PlanMemory
from smkern.models.step import Caches, Step
from smkern.ops.workspace import Scratch
from smkern.runtime.executor import PrefillChunk, ids_of_chunks
from smkern.runtime.model import sizes
from smkern.runtime.model.prefill import reserve
from smkern.runtime.model.row_state import RowState


class MixedInputs:
    """What mixed forwards read, at fixed addresses: chunks, a token of each slot, padding.

    Rows of `kv_lens` and `cu_q_lens` are one for each chunk that may be, and the slots'; those that
    a forward does not use have no tokens. Tokens behind the last request's are a graph's padding.

    Args:
        num_sms: SMs of every operator. None: all that the stream's partition has.
    """

    def __init__(
        self,
        state: RowState,
        caches: Caches,
        activations: ActivationBuffers,
        max_tokens: int,
        max_context: int,
        num_sms: int | None,
    ) -> None:
        self.max_rows = padded_rows(max_tokens + state.max_running)
        self._max_chunks = state.max_prefill // 2  # the others are of batches by layers
        self._state = state
        self._caches = caches
        self._activations = activations
        self._max_context = max_context
        self._num_sms = num_sms
        self._staging = Staging(state.device)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=state.device)

        self._token_ids = zeros(self.max_rows)
        self._kv_lens = zeros(self._max_chunks + state.max_running)
        self._cu_q_lens = zeros(len(self._kv_lens) + 1)
        self._no_keys = zeros(1)[0]
        self._slots = state.inputs(state.first_slot, state.max_running)

    @property
    def num_bytes(self) -> int:
        return self._token_ids.nbytes + self._kv_lens.nbytes + self._cu_q_lens.nbytes

    def reserve(self) -> None:
        """Take the pinned memory of the longest forward, as often as several are on their way."""
        reserve(self._staging, self._token_ids)

    def write(self, chunks: Sequence[PrefillChunk], lengths: Sequence[int]) -> Step:
        """Send a forward's numbers on the current stream.

        Args:
            lengths: Bounds of the keys of each slot that decodes.

        Returns:
            The forward of these requests alone.
        """
        counts, ends = [chunk.count for chunk in chunks], [chunk.end for chunk in chunks]
        return self.send(ids_of_chunks(chunks), counts, ends, lengths)

    def send(
        self,
        token_ids: Sequence[int],
        counts: Sequence[int],
        ends: Sequence[int],
        lengths: Sequence[int],
    ) -> Step:
        """As `write`, of all chunks' tokens, and of each how many and its request's keys."""
        state, spare, batch = self._state, self._max_chunks - len(counts), len(lengths)
        split = len(token_ids)
        total = split + batch
        cu_q_lens = [0] * spare + [0, *accumulate([*counts, *[1] * batch])]
        cu_q_lens += [total] * (state.max_running - batch)
        self._staging.send(
            [
                (self._token_ids[:split], token_ids),
                (self._kv_lens[: self._max_chunks], [0] * spare + [*ends]),
                (self._cu_q_lens, cu_q_lens),
            ]
        )
        slots = self._slots
        self._token_ids[split:total].copy_(slots.token_ids[:batch])
        # a row that has finished, maybe since the host last heard, reads and writes no keys
        torch.where(
            slots.finished, self._no_keys, slots.kv_lens, out=self._kv_lens[self._max_chunks :]
        )
        here = slice(spare, spare + len(counts) + batch)
        most = sizes.bounds(counts, [*ends, *lengths], self._max_context)
        return self._step(padded_rows(total), here, most)

    def padded(self, rows: int, context: int) -> Step:
        """The forward of all requests that may be: what a graph is captured of.

        Args:
            rows: Tokens.
            context: Keys of a request, at most.
        """
        batch = len(self._kv_lens)
        most = sizes.Bounds(
            max_q_len=sizes.query_bucket(rows), max_kv_len=context, max_total_kv=context * batch
        )
        return self._step(rows, slice(0, batch), most)

    def clear(self) -> None:
        """No request has a token."""
        self._kv_lens.zero_()
        self._cu_q_lens.zero_()

    def _step(self, tokens: int, here: slice, most: sizes.Bounds) -> Step:
        first = self._state.first_slot - self._max_chunks
        return Step.make(
            self._activations,
            token_ids=self._token_ids[:tokens],
            kv_lens=self._kv_lens[here],
            page_table=self._state.page_table[first + here.start : first + here.stop],
            caches=self._caches,
            cu_q_lens=self._cu_q_lens[here.start : here.stop + 1],
            num_sms=self._num_sms,
            **most,
        )


class MixedGraph:
    """All layers of a mixed forward of so many rows on the whole device, captured once.

    The head and the draws are launched behind it: they are for the rows that there are.

    Args:
        model: The model.
        inputs: What it reads; nothing of it may be on its way.
        rows: Tokens, padding included.
        context: Keys of a request, at most.
        plan_memory: Memory of attention's plan, shared by graphs that never run at the same time.
        scratch: Workspaces of its operators, shared likewise.
        pool: Memory pool of torch's graphs to capture in.
        stream: Stream to capture on.
        capture: Whether to capture; otherwise a launch calls the operators.
    """

    def __init__(
        self,
        model: LayeredModel,
        inputs: MixedInputs,
        rows: int,
        context: int,
        *,
        plan_memory: PlanMemory,
        scratch: Scratch,
        pool: Any = None,
        stream: Any = None,
        capture: bool = True,
    ) -> None:
        self._model = model
        self._scratch = scratch
        self._step = inputs.padded(rows, context).planned_in(plan_memory)
        self._graph: Any = None
        if capture:
            inputs.clear()
            torch.cuda.synchronize(model.device)
            self._graph = captured(
                self._run, model.device, warm=partial(self._run, warming_layers), pool=pool,
                stream=stream,
            )  # fmt: skip

    def launch(self) -> None:
        """Launch the layers on the current stream."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def close(self) -> None:
        """Destroy the graph; its last launch must be over. Closing twice is fine."""
        if self._graph is not None:
            self._graph.reset()

    def _run(self, layers: Callable[[LayeredModel, Step], None] = all_layers) -> None:
        with self._scratch.on():
            layers(self._model, self._step.planned(out=self._step.plan))
