"""One forward of prompts' chunks and a token of each request that decodes, on the whole device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from smkern.kv import Staging
from smkern.latency import Size
from smkern.models.layered import LayeredModel, forward
from smkern.models.step import Caches, Step
from smkern.runtime.device import Work
from smkern.runtime.executor import PrefillChunk, size_chunks
from smkern.runtime.interleaver import MAX_QUEUED_LAUNCHES
from smkern.runtime.model import sizes
from smkern.runtime.model.input_batch import RowUpdate
from smkern.runtime.model.marks import Marks
from smkern.runtime.model.prefill import PrefillBuffers, reserve
from smkern.runtime.model.reads import Read, Source
from smkern.runtime.model.row_state import RowState
from smkern.runtime.place import Place
from smkern.runtime.request import Request

LayerDone = Callable[[int], object]
"""Called with the number of a layer that was launched."""


class MixedRunner:
    """Runs chunks and decode rows as one ragged forward.

    The chunks' rows lie in front of the slots, the chunks' token ids in front of a copy of the
    slots' tokens: whatever the numbers, the forward reads ranges. Nothing of what the step before
    drew is needed on the host, so steps are launched ahead.

    Args:
        model: The model.
        caches: A (k_cache, v_cache) a layer.
        state: The rows.
        prompts: Buffers of prefill slot 0: activations and plan, with room for the decode rows.
        max_tokens: New tokens of prompts.
        max_context: Tokens of a request.
    """

    def __init__(
        self,
        model: LayeredModel,
        caches: Caches,
        state: RowState,
        prompts: PrefillBuffers,
        max_tokens: int,
        max_context: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._state = state
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._max_context = max_context
        self._staging = Staging(state.device)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=state.device)

        self._max_chunks = state.max_prefill
        self._token_ids = zeros(max_tokens + state.max_running)
        self._kv_lens = zeros(self._max_chunks + state.max_running)
        self._cu_q_lens = zeros(self._max_chunks + state.max_running + 1)
        self._no_keys = zeros(1)[0]
        # Only where two forwards are more than a stream's queue holds.
        self._marks: Marks | None = None
        if state.device.type == "cuda" and 2 * self.launches > MAX_QUEUED_LAUNCHES:
            self._marks = Marks(model.config.num_layers, self.launches, state.device)

    @property
    def num_bytes(self) -> int:
        return self._token_ids.nbytes + self._kv_lens.nbytes + self._cu_q_lens.nbytes

    def warm(self) -> None:
        """Take the pinned memory of the longest forward, as often as several are on their way."""
        reserve(self._staging, self._token_ids)

    def size(self, chunks: Sequence[PrefillChunk], lengths: Sequence[int]) -> Size:
        """What the forward is made of.

        Args:
            chunks: The chunks.
            lengths: Keys of each request that decodes.
        """
        layers = self._model.config.num_layers
        return Size(size_chunks(chunks), layers, layers, True, len(lengths), sum(lengths))

    @property
    def launches(self) -> int:
        """Kernels of a forward, at most."""
        config = self._model.config
        return config.num_layers * sizes.layer_launches(config) + 14

    def work(
        self,
        launch: Callable[[Place, LayerDone | None], Any],
        size: Size,
        about: dict[str, Any],
    ) -> Work:
        """A forward to be launched, which tells how far it is where it is long.

        Args:
            launch: Runs it at a place, with what `run` takes as `behind`.
            size, about: Of the work.
        """
        if self._marks is None:
            return Work("mixed", lambda place: launch(place, None), size, self.launches, about)
        mark = self._marks.next()
        return Work(
            "mixed", lambda place: launch(place, mark.layer_done), size, self.launches, about,
            lambda end: mark.left(),
        )  # fmt: skip

    def run(
        self,
        chunks: Sequence[PrefillChunk],
        requests: Sequence[Request],
        lengths: Sequence[int],
        update: RowUpdate,
        read: Read,
        behind: LayerDone | None = None,
    ) -> None:
        """Launch the forward on the current stream.

        Args:
            chunks: The chunks, by row in front of the slots.
            requests: Those that decode, by slot.
            lengths: Bounds of their keys.
            update: Gives both their rows.
            read: Gets the tokens: the chunks', then the slots'.
            behind: Called with each layer that is launched.
        """
        read.reserve()  # once it has drawn, what runs has advanced: nothing may raise any more
        update.send()
        step = self._step(chunks, requests, lengths).planned_in(self._prompts.plans)
        logits = forward(self._model, step, behind)
        rows = self._state.inputs(self._state.first_slot - len(chunks), step.batch)
        rows.draw(logits, step.kv_lens, num_sms=step.num_sms)
        read.copy(Source.of(rows.token_ids))

    def _step(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[Request], lengths: Sequence[int]
    ) -> Step:
        num_chunks, batch, first = len(chunks), len(requests), self._state.first_slot
        counts = [chunk.count for chunk in chunks]
        ends = [chunk.end for chunk in chunks]
        tokens = [id_ for chunk in chunks for id_ in chunk.ids]
        begin, split = self._max_tokens - len(tokens), self._max_tokens
        rows = slice(self._max_chunks - num_chunks, self._max_chunks + batch)
        cu_q_lens = self._cu_q_lens[: num_chunks + batch + 1]
        self._staging.send(
            [
                (self._token_ids[begin:split], tokens),
                (self._kv_lens[rows.start : self._max_chunks], ends),
                (cu_q_lens, [0, *accumulate([*counts, *[1] * batch])]),
            ]
        )
        if batch:
            slots = self._state.inputs(first, batch)
            self._token_ids[split : split + batch].copy_(slots.token_ids)
            # a row that has finished, maybe since the host last heard, reads and writes no keys
            torch.where(
                slots.finished,
                self._no_keys,
                slots.kv_lens,
                out=self._kv_lens[self._max_chunks : rows.stop],
            )
        return Step.make(
            self._prompts.activations,
            token_ids=self._token_ids[begin : split + batch],
            kv_lens=self._kv_lens[rows],
            page_table=self._state.page_table[first - num_chunks : first + batch],
            caches=self._caches,
            cu_q_lens=cu_q_lens,
            num_sms=self._prompts.num_sms,
            **sizes.bounds(counts, [*ends, *lengths], self._max_context),
        )
