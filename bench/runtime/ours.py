"""A model with smkern's own kernels on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smkern import ops
from smkern.bench.model import model as steady_model
from smkern.bench.model.model import Model
from smkern.bench.ops.sampling import Settings
from smkern.bench.runtime.cases import OURS, RuntimePlan
from smkern.bench.runtime.stamps import Stamps
from smkern.models import ActivationBuffers, DecodeGraph, DecodeInputs, Step
from smkern.partition import Partition
from smkern.runtime.place import Place


class SteadyGraph(DecodeGraph):
    """A decode step that finds the same lengths at every replay, and stamps both its ends."""

    def __init__(self, *args: Any, lengths: Tensor, stamps: Stamps, **options: Any) -> None:
        self.lengths = lengths
        self.stamps = stamps
        super().__init__(*args, **options)

    def run_eagerly(self) -> None:
        self.stamps.mark()
        torch.add(self.lengths, 0, out=self.inputs.kv_lens)
        super().run_eagerly()
        self.stamps.mark()


@dataclass(slots=True)
class Draw:
    """The draw behind a mixed forward's logits, with settings of its own."""

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


def pieces_of(chunk: int, start: int, tokens: int) -> list[tuple[int, int]]:
    """(tokens, those before them) of the pieces of a chunk that may run into further prompts."""
    pieces = []
    while chunk > 0:
        count = min(chunk, tokens - start)
        pieces.append((count, start))
        chunk, start = chunk - count, 0
    return pieces


class Ours:
    """The reference decoder on the runtime's places.

    Args:
        plan: What is measured.
        model: With its caches.
        stamps: Of decode steps.
        partition: The partition of a place; None: the whole device.
    """

    provider = OURS

    def __init__(
        self,
        plan: RuntimePlan,
        model: Model,
        stamps: Stamps,
        partition: Callable[[Place], Partition | None],
    ) -> None:
        device = model.device
        self.plan = plan
        self.device = device
        self.model = model
        self.num_layers = self.model.config.num_layers
        self._stamps = stamps
        self._partition = partition
        self._pool = None if device == "cpu" else torch.cuda.graph_pool_handle()
        self._decode_activations = ActivationBuffers(self.model.config, plan.batch, device=device)
        self._inputs, self._lengths = self._decode_inputs()
        self._prompt = self.model.prefill_step()
        self._graphs: dict[Place, SteadyGraph] = {}
        self._prompts: dict[Place, Step] = {}
        self._mixed_activations: ActivationBuffers | None = None
        self._draw = Draw.of(plan.batch + 2, device)
        self._prompt_draw = Draw.of(1, device)

    def prepare(self, place: Place) -> None:
        """A decode side gets its graph, a prefill side the prompt's plan; the whole device both."""
        if place.side != "prefill" and place not in self._graphs:
            self._graphs[place] = self._capture(place)
        if place.side != "decode" and place not in self._prompts:
            # made on this stream, for the budget of the place's own
            num_sms = None if self.device == "cpu" else place.num_sms
            self._prompts[place] = self._prompt.planned(num_sms=num_sms)

    def decode(self, place: Place) -> None:
        self._graphs[place].launch()

    def layers(self, first: int, count: int, place: Place) -> None:
        decoder, step = self.model.decoder, self._prompts[place]
        if first == 0:
            step.planned(out=step.plan)
            decoder.embed(step)
        for index in range(first, first + count):
            decoder.layer(index, step)
        if first + count == self.num_layers:
            self._prompt_draw(decoder.head(step))

    def mixed(self, chunk: int, start: int) -> Callable[[], None]:
        plan, model, device = self.plan, self.model, self.device
        if self._mixed_activations is None:
            rows = max(plan.chunk_rows)
            self._mixed_activations = ActivationBuffers(model.config, rows, plan.batch + 2, device)
        pieces = pieces_of(chunk, start, plan.tokens)
        counts = [count for count, _ in pieces] + [1] * plan.batch
        lengths = [sum(piece) for piece in pieces] + [plan.context] * plan.batch

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        step = Step.make(
            self._mixed_activations,
            token_ids=torch.arange(sum(counts), dtype=torch.int32, device=device)
            % model.config.vocab_size,
            kv_lens=ints(lengths),
            page_table=self._mixed_table(len(pieces)),
            caches=model.caches.layers,
            max_kv_len=max(plan.tokens, plan.context),
            cu_q_lens=torch.cat([ints([0]), ints(counts).cumsum(0).int()]),
            max_q_len=chunk,
        ).planned()

        def run() -> None:
            step.planned(out=step.plan)
            self._draw(model.decoder.forward(step))

        return run

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _mixed_table(self, pieces: int) -> Tensor:
        """The prompt's pages for each piece, then the decoding requests' pages."""
        prompt, decode = self.model.caches.prefill, self.model.caches.decode[: self.plan.batch]
        columns = max(prompt.shape[1], decode.shape[1])
        table = torch.zeros(
            pieces + self.plan.batch, columns, dtype=torch.int32, device=self.device
        )
        table[:pieces, : prompt.shape[1]] = prompt
        table[pieces:, : decode.shape[1]] = decode
        return table

    def _decode_inputs(self) -> tuple[DecodeInputs, Tensor]:
        batch, room = self.plan.batch, steady_model.ROOM
        table = self.model.caches.decode[:batch]
        inputs = DecodeInputs.make(batch, table, max_kv_len=room)
        settings = Settings.of(batch, self.device)
        inputs = replace(
            inputs,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seeds=settings.seeds,
        )
        inputs.token_ids.copy_(torch.arange(batch) % self.model.config.vocab_size)
        inputs.max_lengths.fill_(room + 1)
        inputs.finished.fill_(False)
        return inputs, torch.full_like(inputs.kv_lens, self.plan.context)

    def _capture(self, place: Place) -> SteadyGraph:
        return SteadyGraph(
            self.model.decoder,
            self._inputs,
            self.model.caches.layers,
            max_kv_len=steady_model.ROOM,
            partition=self._partition(place),
            activations=self._decode_activations,
            pool=self._pool,
            lengths=self._lengths,
            stamps=self._stamps,
        )
