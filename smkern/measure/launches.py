"""A model's launches of any lengths, as the runtime makes them: what a profile times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from smkern.errors import ArgumentError
from smkern.kv import KvPool
from smkern.latency import Chunk, Size
from smkern.latency.work import padded_rows
from smkern.measure.captured import Captured
from smkern.models import Decoder, Step
from smkern.runtime.device import Device, Work
from smkern.runtime.model import sizes
from smkern.runtime.model.graphs import GraphCache
from smkern.runtime.model.mixed import launch_mixed
from smkern.runtime.model.mixed_graph import MixedInputs
from smkern.runtime.model.prefill import PrefillBuffers, prompt_activations
from smkern.runtime.model.row_state import RowState
from smkern.runtime.place import Place

GRAPH_LIMIT_BYTES = 8 << 30
GROUP_LAUNCHES = 160
"""Kernels of a group of prompts' layers, about: with several groups queued the host never waits for
room in a stream's queue, which holds some thousand."""
APART = 500
"""How many times as large embeddings of a mixture of experts are made, next to which is little what
attention adds to all tokens of a prompt alike. Else they choose the same experts: 64 tokens 22 to
45 of Qwen3-30B-A3B's 128 in its second to fifth layer, not 126."""


class ModelLaunches:
    """Decode steps, prompts' layers and mixed forwards of requests that exist on the device only.

    Rows, graphs, plans and buffers are the runtime's own. Tokens are unlike, so that they choose
    experts evenly. A launch finds the same lengths however often it runs; decode rows take pages
    from one end of the pool, prompts from the other, so both may run at once. Only one decode batch
    and one batch of prompts are set up at a time, or one mixed forward.

    Args:
        model: The model, of random weights; a mixture of experts has its embeddings enlarged.
        pool: Its pages; they are filled with random numbers, since zeros take less power.
        device: Where to launch.
        max_running: Decode rows.
        max_prefill: Chunks of a batch of prompts or a mixed forward.
        max_tokens: New tokens of one of these.
        max_context: Tokens of a request.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        device: Device,
        *,
        max_running: int = 256,
        max_prefill: int = 8,
        max_tokens: int = 8192,
        max_context: int | None = None,
    ) -> None:
        self.config = config = model.config
        self.max_running, self.max_prefill = max_running, max_prefill
        self.max_tokens = max_tokens
        self.max_context = max_context or model.max_position
        self.device = device
        self._model, self._pool = model, pool
        if config.moe is not None:
            model.weights.embed.mul_(APART)
        for layer in pool.storage:
            layer.normal_()
        self._caches = caches = [pool.layer(i) for i in range(config.num_layers)]
        where = model.device
        self._where = where
        self._state = RowState.make(
            max_running=max_running,
            max_prefill=2 * max_prefill,
            max_pages=pool.pages_for(self.max_context),
            device=where,
        )
        self._set_rows()
        self._pages = torch.randperm(pool.num_pages, device=where).int()
        activations = prompt_activations(config, where, max_running, max_prefill, max_tokens)[0]
        self._prompts = PrefillBuffers(activations, 0, max_tokens, max_prefill)
        self._token_ids = torch.randint(
            config.vocab_size, (padded_rows(max_tokens),), device=where, dtype=torch.int32
        )
        self._prompt_graph: Captured | None = None
        self._inputs = MixedInputs(
            self._state, caches, activations, max_tokens, self.max_context, None
        )
        self.graphs = GraphCache(
            model,
            self._state,
            caches,
            partition=device.partition,
            synchronize=device.synchronize,
            max_context=self.max_context,
            limit_bytes=GRAPH_LIMIT_BYTES,
            mixed=self._inputs,
        )
        device.synchronize()

    def decode(self, lengths: Sequence[int]) -> Work:
        """A decode step.

        Args:
            lengths: Keys of each request, the new token's included.

        Raises:
            ArgumentError: more rows, keys or pages than there are.
        """
        set_lengths = self._seat(lengths)
        batch, longest = len(lengths), max(lengths)
        self.device.synchronize()

        def launch(place: Place) -> None:
            set_lengths()
            self.graphs.launch(place, batch, longest)

        size = Size(num_layers=self.config.num_layers, batch=batch, total_kv=sum(lengths))
        return Work("decode", launch, size, 2)

    def capture(self, place: Place, lengths: Sequence[int]) -> None:
        """Capture the graph of a decode step at a place, if it is not there; waits.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """
        self.graphs.capture([place], [len(lengths)], [max(lengths)])
        self._check_captured()

    def prompts(self, chunks: Sequence[Chunk], layers: int | None = None) -> list[Work]:
        """A batch of prompts, by groups of layers.

        Args:
            chunks: Its prompts.
            layers: The first so many layers, without the head; None: all and the head.

        Raises:
            ArgumentError: more chunks, tokens or pages than there are.
        """
        config = self.config
        count = config.num_layers if layers is None else layers
        step = self._step(chunks)
        planned: list[Step] = []
        group = max(1, GROUP_LAUNCHES // sizes.layer_launches(config))
        works = []
        for first in range(0, count, group):
            end = min(first + group, count)
            head = layers is None and end == count

            def launch(place: Place, first: int = first, end: int = end, head: bool = head) -> None:
                if first == 0:
                    planned[:] = [step.planned_in(self._prompts.plans)]
                    self._model.embed(planned[0])
                for index in range(first, end):
                    self._model.layer(index, planned[0])
                if head:
                    self._draw(self._model.head(planned[0]), step, len(chunks))

            size = Size(tuple(chunks), end - first, config.num_layers, head)
            works.append(Work("prefill", launch, size, GROUP_LAUNCHES))
        return works

    def prompt_graph(self, chunks: Sequence[Chunk], place: Place) -> list[Work]:
        """A batch of prompts at a place as one graph, whose kernels do not wait for the host.

        Valid until the next one is made; nothing may run.

        Raises:
            ArgumentError: as of `prompts`.
        """
        works = self.prompts(chunks)

        def launch() -> None:
            for work in works:
                work.run(place)

        self._drop_prompt_graph()
        graph = self._prompt_graph = Captured(
            launch, self.device.partition(place), on_gpu=self._where.type == "cuda"
        )
        layers = self.config.num_layers
        size = Size(tuple(chunks), layers, layers, True)
        return [Work("prefill", lambda place: graph.replay(), size)]

    def mixed(self, chunks: Sequence[Chunk], lengths: Sequence[int]) -> Work:
        """One forward of prompts' chunks and of decode rows.

        Args:
            chunks: The chunks.
            lengths: Keys of each decoding request, the new token's included.

        Raises:
            ArgumentError: more than there is room for.
            torch.OutOfMemoryError: there is no memory for its graph.
        """
        set_lengths = self._seat(lengths)
        counts, ends = self._seat_chunks(chunks)
        rows, longest = sum(counts) + len(lengths), max([*ends, *lengths])
        self.graphs.capture_mixed([rows], [longest])
        self._check_captured()
        graph = self.graphs.mixed(rows, longest)
        token_ids = self._token_ids[: sum(counts)].tolist()
        self.device.synchronize()

        def launch(place: Place) -> None:
            set_lengths()
            step = self._inputs.send(token_ids, counts, ends, lengths)
            logits = launch_mixed(self._model, step, graph, self._prompts.plans)
            self._draw(logits, step, len(chunks))

        layers = self.config.num_layers
        size = Size(tuple(chunks), layers, layers, True, len(lengths), sum(lengths))
        return Work("mixed", launch, size, layers * sizes.layer_launches(self.config))

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self._pool.num_pages * self._pool.page_size

    def close(self) -> None:
        """Wait for all that was launched, and destroy the graphs; what is launched then has new
        ones."""
        self.device.synchronize()
        self._drop_prompt_graph()
        self.graphs.close()

    def _check_captured(self) -> None:
        """Without its graph a launch would be timed by what launching takes the host."""
        if self.graphs.refused:
            raise torch.OutOfMemoryError(self.graphs.refused.popitem()[1])

    def _drop_prompt_graph(self) -> None:
        if self._prompt_graph is not None:
            self._prompt_graph.close()
            self._prompt_graph = None

    def _seat(self, lengths: Sequence[int]) -> Callable[[], object]:
        """Requests that decode have slots and pages; what sets their lengths, as a step adds 1."""
        self._check(lengths, self.max_running)
        first, batch = self._state.first_slot, len(lengths)
        self._state.finished[first:] = True
        self._state.finished[first : first + batch] = False
        self._deal(first, lengths)
        return partial(self._state.inputs(first, batch).kv_lens.copy_, self._ints(lengths))

    def _seat_chunks(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        """Chunks have rows in front of the slots, and pages; their new tokens, and their keys."""
        counts = [chunk.new for chunk in chunks]
        ends = [chunk.new + chunk.cached for chunk in chunks]
        if not 0 < sum(counts) <= self.max_tokens:
            raise ArgumentError(
                f"{sum(counts)} new tokens: there is room for 1 to {self.max_tokens}; raise "
                "max_tokens"
            )
        self._check(ends, self.max_prefill)
        rows = slice(self._state.first_slot - len(chunks), self._state.first_slot)
        self._deal(rows.start, ends, from_end=True)
        self._state.finished[rows] = False
        return counts, ends

    def _step(self, chunks: Sequence[Chunk]) -> Step:
        """The forward of prompts."""
        counts, ends = self._seat_chunks(chunks)
        first = self._state.first_slot - len(chunks)
        step = Step.make(
            self._prompts.activations,
            token_ids=self._token_ids[: padded_rows(sum(counts))],
            kv_lens=self._ints(ends),
            page_table=self._state.page_table[first : self._state.first_slot],
            caches=self._caches,
            cu_q_lens=self._ints([0, *accumulate(counts)]),
            **sizes.bounds(counts, ends, self.max_context),
        )
        self.device.synchronize()
        return step

    def _draw(self, logits: torch.Tensor, step: Step, num_chunks: int) -> None:
        rows = self._state.inputs(self._state.first_slot - num_chunks, step.batch)
        rows.draw(logits, step.kv_lens)

    def _deal(self, first: int, lengths: Sequence[int], *, from_end: bool = False) -> None:
        """Give rows their pages: one row's behind another's, from the pool's begin or end."""
        page_size = self._pool.page_size
        pages = self._pages.flip(0) if from_end else self._pages
        at = [0, *accumulate(-(-length // page_size) for length in lengths)]
        if at[-1] > self._pool.num_pages:
            raise ArgumentError(
                f"{sum(lengths)} keys take {at[-1]} pages, the pool has {self._pool.num_pages}: "
                "profile shorter contexts"
            )
        table = self._state.page_table[first : first + len(lengths)]
        columns = torch.arange(table.shape[1], device=self._where)
        begins = torch.tensor(at[:-1], device=self._where)[:, None]
        # columns behind a row's keys are never read
        table.copy_(pages[(begins + columns).clamp_(max=self._pool.num_pages - 1)])

    def _check(self, lengths: Sequence[int], most: int) -> None:
        if not 1 <= len(lengths) <= most or max(lengths) > self.max_context:
            raise ArgumentError(
                f"{len(lengths)} requests of at most {max(lengths, default=0)} keys: there is room "
                f"for 1 to {most} of {self.max_context}"
            )

    def _set_rows(self) -> None:
        """Unlike tokens, then draws as users make them, not greedy ones, each row its own."""
        rows = self._state.inputs(0, self._state.num_rows)
        rows.token_ids.random_(self.config.vocab_size)
        rows.seeds.copy_(torch.arange(len(rows.seeds)))
        rows.temperature.fill_(0.8)
        rows.top_k.fill_(50)
        rows.top_p.fill_(0.95)

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._where)
