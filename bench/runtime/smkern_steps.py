"""A model with smkern's own kernels on both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smkern import ops
from smkern.bench.model import model as steady_model
from smkern.bench.model.model import Model
from smkern.bench.ops.sampling import Settings
from smkern.bench.runtime.cases import OURS, RuntimePlan
from smkern.bench.runtime.model_steps import Forward, Graphs, MixedRows, PartitionOf, Run
from smkern.bench.runtime.stamps import Stamps
from smkern.models import ActivationBuffers, DecodeGraph, DecodeInputs, Step
from smkern.partition import Partition
from smkern.runtime.place import Place


@dataclass(slots=True)
class Draw:
    """The draw behind a forward's logits, with settings of its own."""

    settings: Settings
    out: Tensor

    @classmethod
    def of(cls, rows: int, device: str) -> Draw:
        return cls(Settings.of(rows, device), torch.zeros(rows, dtype=torch.int32, device=device))

    def __call__(self, logits: Tensor) -> None:
        n, chosen = logits.shape[0], self.settings
        ops.sample(
            logits,
            temperature=chosen.temperature[:n],
            top_k=chosen.top_k[:n],
            top_p=chosen.top_p[:n],
            seeds=chosen.seeds[:n],
            steps=chosen.steps[:n],
            out=self.out[:n],
        )


class SmkernSteps:
    """The reference decoder on the runtime's places; see `ModelSteps`.

    Args:
        plan: What is measured.
        model: With its caches.
        stamps: Get the moments of decode steps.
        partition: The partition of a place.

    Attributes:
        prompt: The prompt's step; what a place runs has the same buffers.
        decode_inputs: What decode steps read.
        decode_logits: [batch, vocab_size] of the last decode step.
    """

    provider = OURS

    def __init__(
        self, plan: RuntimePlan, model: Model, stamps: Stamps, partition: PartitionOf
    ) -> None:
        self._plan, self._model, self._device = plan, model, model.device
        self.num_layers = model.config.num_layers
        on_gpu = model.device != "cpu"
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self._graphs = Graphs(stamps, partition, on_gpu=on_gpu)
        self._decode_activations = ActivationBuffers(model.config, plan.batch, device=model.device)
        self.decode_logits = self._decode_activations.buffers(plan.batch, plan.batch).logits
        self.decode_inputs = self._inputs()
        self._lengths = torch.full_like(self.decode_inputs.kv_lens, plan.context)
        self.prompt = model.prefill_step()
        self._prompts: dict[Place, Step] = {}
        self._mixed_activations: ActivationBuffers | None = None
        self._draw = Draw.of(plan.batch + 2, model.device)
        self._prompt_draw = Draw.of(1, model.device)

    def prepare(self, place: Place) -> None:
        """A decode side gets its graph, a prefill side the prompt's plan; the whole device both."""
        self._graphs.prepare(place, self._decode_step, self._pool)
        if place.side != "decode" and place not in self._prompts:
            # made on this stream, for the budget of the place's own
            num_sms = None if self._device == "cpu" else place.num_sms
            self._prompts[place] = self.prompt.planned(num_sms=num_sms)

    def decode(self, place: Place) -> None:
        self._graphs.launch(place)

    def layers(self, first: int, count: int, place: Place) -> None:
        decoder, step = self._model.decoder, self._prompts[place]
        if first == 0:
            step.planned(out=step.plan)
            decoder.embed(step)
        for index in range(first, first + count):
            decoder.layer(index, step)
        if first + count == self.num_layers:
            self._prompt_draw(decoder.head(step))

    def mixed(self, chunk: int, start: int) -> Forward:
        plan, model = self._plan, self._model
        if self._mixed_activations is None:
            rows = max(plan.chunk_rows)
            self._mixed_activations = ActivationBuffers(
                model.config, rows, plan.batch + 2, self._device
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

    def close(self) -> None:
        self._graphs.close()

    def _decode_step(self, partition: Partition | None) -> Run:
        """A decode step that finds the same lengths whenever it runs."""
        graph = DecodeGraph(
            self._model.decoder,
            self.decode_inputs,
            self._model.caches.layers,
            max_kv_len=steady_model.ROOM,
            partition=partition,
            activations=self._decode_activations,
            capture=False,  # with its stamps, by `Graphs`
        )

        def run() -> None:
            torch.add(self._lengths, 0, out=self.decode_inputs.kv_lens)
            graph.run_eagerly()

        return run

    def _inputs(self) -> DecodeInputs:
        batch, room = self._plan.batch, steady_model.ROOM
        settings = Settings.of(batch, self._device)
        inputs = replace(
            DecodeInputs.make(batch, self._model.caches.decode[:batch], max_kv_len=room),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seeds=settings.seeds,
        )
        inputs.token_ids.copy_(torch.arange(batch) % self._model.config.vocab_size)
        inputs.max_lengths.fill_(room + 1)
        inputs.finished.fill_(False)
        return inputs

    def _ints(self, values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self._device)
