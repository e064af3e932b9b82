"""A model with smkern's own kernels on both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.bench.model.model import Model
from smkern.bench.ops.sampling import Settings
from smkern.bench.runtime.cases import OURS, RuntimePlan
from smkern.bench.runtime.model_steps import Forward, MixedRows, ModelSteps, PartitionOf, Run
from smkern.bench.runtime.stamps import Stamps
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
        plan, model = self._plan, self._model
        if self._mixed_activations is None:
            rows = max(plan.chunk_rows)
            self._mixed_activations = ActivationBuffers(
                model.config, rows, plan.batch + 2, model.device
            )
        rows_of = MixedRows.of(plan, model, chunk, start)
        counts = self._ints(rows_of.counts)
        step = Step.make(
            self._mixed_activations,
            token_ids=self._ints(range(sum(rows_of.counts))) % model.config.vocab_size,
            kv_lens=self._ints(rows_of.lengths),
            page_table=rows_of.table,
            caches=model.caches.layers,
            max_kv_len=max(plan.tokens, plan.context),
            cu_q_lens=torch.cat([self._ints([0]), counts.cumsum(0).int()]),
            max_q_len=chunk,
        ).planned()

        def run() -> None:
            step.planned(out=step.plan)
            self._draw(model.decoder.forward(step))

        return Forward(run, step.token_ids, step.buffers.logits)

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
