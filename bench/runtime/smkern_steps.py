"""A model with smkern's own kernels on both sides."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from smkern.bench.model.model import Model
from smkern.bench.ops.sampling import Settings
from smkern.bench.runtime.cases import OURS, RuntimePlan
from smkern.bench.runtime.model_steps import Forward, MixedRows, ModelSteps, PartitionOf
from smkern.bench.runtime.stamps import Stamps
from smkern.measure.captured import Captured, Run
from smkern.models import ActivationBuffers, Step
from smkern.partition import Partition
from smkern.runtime.place import Place


class SmkernSteps(ModelSteps):
    """The reference decoder on the runtime's places; see `ModelSteps`.

    Attributes:
        prompt: The prompt's step; what a place runs has the same buffers.
        decode_inputs: What decode steps read.
        decode_logits: [batch, vocab_size] of the last decode step.
    """

    provider = OURS

    def __init__(
        self, plan: RuntimePlan, model: Model, stamps: Stamps, partition: PartitionOf
    ) -> None:
        super().__init__(plan, model, stamps, partition)
        self._pool: Any = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self.decode_logits = model.decode_activations.buffers(plan.batch, plan.batch).logits
        self.decode_inputs = model.decode_inputs(plan.batch)
        self._lengths = torch.full_like(self.decode_inputs.kv_lens, plan.context)
        self.prompt = model.prefill_step()
        self._prompts: dict[Place, Step] = {}
        self._mixed_activations: ActivationBuffers | None = None
        self._mixed: dict[tuple[int, int], tuple[Tensor, Step, Captured]] = {}
        rows = plan.batch + 2  # of a mixed forward; a prompt alone has one
        self._settings = Settings.of(rows, model.device)
        self._drawn = torch.zeros(rows, dtype=torch.int32, device=model.device)

    def prepare(self, place: Place) -> None:
        """A decode side gets its graph, a prefill side the prompt's plan; the whole device both."""
        self._graphs.prepare(place, self._decode_step, self._pool)
        if place.side != "decode" and place not in self._prompts:
            # made on this stream, for the budget of the place's own
            num_sms = place.num_sms if self._on_gpu else None
            self._prompts[place] = self.prompt.planned(num_sms=num_sms)

    def layers(self, first: int, count: int, place: Place) -> None:
        decoder, step = self._model.decoder, self._prompts[place]
        if first == 0:
            step.planned(out=step.plan)
            decoder.embed(step)
        for index in range(first, first + count):
            decoder.layer(index, step)
        if first + count == self.num_layers:
            self._draw(decoder.head(step))

    def mixed(self, chunk: int, start: int) -> Forward:
        rows = MixedRows.of(self._plan, self._model, chunk, start)
        lengths = self._ints([*rows.lengths, 0, *accumulate(rows.counts)])
        key = chunk, rows.pieces
        if key not in self._mixed:
            self._mixed[key] = self._mixed_graph(chunk, rows, lengths.clone())
        read, step, graph = self._mixed[key]

        def run() -> None:
            read.copy_(lengths)
            graph.replay()

        return Forward(run, step.token_ids, step.buffers.logits)

    def close(self) -> None:
        for _, _, graph in self._mixed.values():
            graph.close()
        super().close()

    def _mixed_graph(
        self, chunk: int, rows: MixedRows, read: Tensor
    ) -> tuple[Tensor, Step, Captured]:
        """Mixed forwards of so many pieces: the lengths that they read, the step, and its graph."""
        plan, model = self._plan, self._model
        if self._mixed_activations is None:
            self._mixed_activations = ActivationBuffers(
                model.config, max(plan.chunk_rows), plan.batch + 2, model.device
            )
        requests = len(rows.counts)
        step = Step.make(
            self._mixed_activations,
            token_ids=self._ints(range(sum(rows.counts))) % model.config.vocab_size,
            kv_lens=read[:requests],
            page_table=rows.table,
            caches=model.caches.layers,
            max_kv_len=max(plan.tokens, plan.context),
            cu_q_lens=read[requests:],
            max_q_len=chunk,
        ).planned()

        def launch() -> None:
            step.planned(out=step.plan)
            self._draw(model.decoder.forward(step))

        return read, step, Captured(launch, None, on_gpu=self._on_gpu, pool=self._pool)

    def _decode_step(self, partition: Partition | None) -> Run:
        """A decode step that finds the same lengths whenever it runs."""
        # captured by `Graphs`, with its stamps
        graph = self._model.decode_graph(self.decode_inputs, partition, capture=False)

        def run() -> None:
            torch.add(self._lengths, 0, out=self.decode_inputs.kv_lens)
            graph.run_eagerly()

        return run

    def _draw(self, logits: Tensor) -> None:
        rows = len(logits)
        self._settings.first(rows).draw(logits, self._drawn[:rows])

    def _ints(self, values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._model.device)
