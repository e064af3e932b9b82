"""A model with random weights on the device: its caches, a prompt, graphs of decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from smkern import ops
from smkern.bench.model.cases import CONTEXT, SHORTER, ModelPlan
from smkern.bench.ops.sampling import Settings
from smkern.measure.partitions import Place
from smkern.measure.timing import Call
from smkern.models import (
    ActivationBuffers,
    DecodeGraph,
    DecodeInputs,
    Decoder,
    ModelConfig,
    Step,
    TensorParallel,
    Weights,
)
from smkern.models.shard import WHOLE
from smkern.partition import Partition

PAGE_SIZE = 16
ROOM = CONTEXT + PAGE_SIZE
"""Tokens that a request may get: a replay lengthens it, and must not end it."""


@dataclass(slots=True)
class Caches:
    """Pages of all layers with normal values, dealt out in no order: decode's, then the prompt's.

    Args:
        layers: (k_cache, v_cache) of each, [pages, page_size, kv_heads, head_dim].
        decode: [batch, pages of `ROOM`] int32, the largest batch's table.
        prefill: [1, pages of the prompt] int32, or as many of `SHORTER` prompts.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    decode: Tensor
    prefill: Tensor

    @classmethod
    def make(cls, config: ModelConfig, plan: ModelPlan, device: str) -> Caches:
        """Each layer head-major, as smkern's own pool has it."""
        batch, columns = max(plan.batches), -(-ROOM // PAGE_SIZE)
        own = SHORTER * -(-plan.tokens // SHORTER // PAGE_SIZE)
        pages = batch * columns + own
        shape = (pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        generator = torch.Generator(device).manual_seed(1)

        def cache() -> Tensor:
            values = torch.empty(shape, dtype=config.dtype, device=device)
            values.normal_(generator=generator)
            return values.to(torch.float8_e4m3fn if plan.fp8_cache else config.dtype).transpose(
                1, 2
            )

        order = torch.randperm(pages, generator=generator, device=device).int()
        tables = order[: batch * columns].view(batch, columns), order[batch * columns :][None]
        return cls([(cache(), cache()) for _ in range(config.num_layers)], *tables)


class Model:
    """A decoder, its caches, and activation buffers for decode steps and for a prompt.

    Args:
        plan: the batches and the prompt to have room for.
        device: where it lies.
        config: another configuration than the preset of the plan's name.
        tp: the ranks, of which this one's part is made.
        weighted: layers that have weights, which the others take by turns; None: all.
    """

    def __init__(
        self,
        plan: ModelPlan,
        device: str = "cuda",
        config: ModelConfig | None = None,
        tp: TensorParallel | None = None,
        weighted: int | None = None,
    ) -> None:
        self.plan, self.device = plan, device
        whole = config or plan.config
        positions, layers = max(ROOM, plan.tokens), whole.num_layers
        weights = Weights.random(
            whole.replace(num_layers=weighted or layers),
            device=device,
            shard=WHOLE if tp is None else tp.shard,
        )
        weights = replace(
            weights,
            config=weights.config.replace(num_layers=layers),
            layers=tuple(islice(cycle(weights.layers), layers)),
        )
        self.decoder = Decoder(whole, weights, max_position=positions, tp=tp)
        self.config = config = self.decoder.config
        self.caches = Caches.make(config, plan, device)
        self.decode_activations = ActivationBuffers(config, max(plan.batches), device=device)
        self._prefill_activations = ActivationBuffers(config, plan.tokens, SHORTER, device=device)
        self._generator = torch.Generator(device).manual_seed(2)

    def prefill_step(self, batch: int = 1) -> Step:
        """The plan's tokens as so many prompts with nothing cached; it has no plan yet."""
        tokens = self.plan.tokens // batch
        starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * tokens
        return Step.make(
            self._prefill_activations,
            token_ids=self._tokens(batch * tokens),
            kv_lens=torch.full((batch,), tokens, dtype=torch.int32, device=self.device),
            page_table=self.caches.prefill.view(batch, -1),
            caches=self.caches.layers,
            max_kv_len=tokens,
            cu_q_lens=starts,
            max_q_len=tokens,
        )

    def decode(self, batch: int, place: Place) -> DecodeLoop:
        """A step of `batch` requests with `CONTEXT` keys, captured in a place.

        Raises:
            ValueError: logits that are not finite: what ran was not the model.
        """
        graph = self.decode_graph(self.decode_inputs(batch), place.partition)
        loop = DecodeLoop(graph, place, torch.full_like(graph.inputs.kv_lens, CONTEXT))
        loop.check(self.plan.model)
        return loop

    def decode_inputs(self, batch: int) -> DecodeInputs:
        """Requests with `CONTEXT` keys that draw as `Settings` says, and do not end."""
        inputs = DecodeInputs.make(batch, self.caches.decode[:batch], max_kv_len=ROOM)
        settings = Settings.of(batch, self.device)
        for name in ("temperature", "top_k", "top_p", "seeds"):
            getattr(inputs, name).copy_(getattr(settings, name))
        inputs.token_ids.copy_(self._tokens(batch))
        inputs.max_lengths.fill_(ROOM + 1)
        inputs.kv_lens.fill_(CONTEXT)
        inputs.finished.fill_(False)
        return inputs

    def decode_graph(
        self, inputs: DecodeInputs, partition: Partition | None, *, capture: bool = True
    ) -> DecodeGraph:
        """A step on these inputs; all steps share the decode activations."""
        return DecodeGraph(
            self.decoder,
            inputs,
            self.caches.layers,
            max_kv_len=ROOM,
            partition=partition,
            activations=self.decode_activations,
            capture=capture,
        )

    def _tokens(self, count: int) -> Tensor:
        size, vocab = (count,), self.config.vocab_size
        return torch.randint(
            vocab, size, generator=self._generator, device=self.device, dtype=torch.int32
        )


@dataclass(slots=True)
class DecodeLoop:
    """A captured step that finds the same lengths at every replay."""

    graph: DecodeGraph
    place: Place
    lengths: Tensor

    @property
    def step(self) -> Step:
        return self.graph.step

    def call(self, i: int) -> None:
        """One step on the current stream, which is the place's."""
        self.graph.inputs.kv_lens.copy_(self.lengths)
        self.graph.replay()

    def check(self, model: str) -> None:
        """Run a step; ValueError where it ended a request or its logits are not finite."""
        self._wait()  # the lengths were filled on another stream
        with torch.cuda.stream(self.place.stream):
            self.call(0)
        self._wait()
        batch = len(self.lengths)
        if bool(self.graph.inputs.finished.any()):
            raise ValueError(f"{model}, batch {batch}: a step ended a request")
        if not bool(torch.isfinite(self.graph.logits).all()):
            raise ValueError(f"{model}, batch {batch}: logits are not finite")

    def close(self) -> None:
        self._wait()
        self.graph.close()

    def _wait(self) -> None:
        """Wait for the stream too: the device's own wait may end before a place's graphs do."""
        self.place.stream.synchronize()
        torch.cuda.synchronize()


def draw_of(inputs: DecodeInputs) -> Callable[[Tensor], Any]:
    """The draw at the end of a step by itself, with flags and lengths of its own."""
    lengths, finished = inputs.kv_lens.clone().zero_(), torch.zeros_like(inputs.finished)
    steps, out = inputs.kv_lens.clone(), inputs.token_ids.clone()
    endless = torch.full_like(inputs.max_lengths, 1 << 30)

    def draw(logits: Tensor) -> Any:
        return ops.sample(
            logits,
            temperature=inputs.temperature,
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            min_p=inputs.min_p,
            seeds=inputs.seeds,
            steps=steps,
            finished=finished,
            lengths=lengths,
            max_lengths=endless,
            stop_tokens=inputs.stop_tokens,
            pad_token=0,
            out=out,
            num_sms=None,
        )

    return draw


def layer_call(model: Model, step: Step) -> Call:
    """Layer after layer of a planned step; the residual stream is never begun anew.

    Without the last, which a prompt does not go through as a whole.
    """
    decoder, count = model.decoder, model.config.num_layers - 1
    return lambda i: decoder.layer(i % count, step)
