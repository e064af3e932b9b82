"""A model's forward whose decode rows and prompts run beside each other on disjoint SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context

import smkern
from smkern.integrations.vllm.linear import SmkernLinearMethod
from smkern.integrations.vllm.metadata import SmkernMetadata, SmkernMetadataBuilder
from smkern.partition.partition import PartitionGraph

MARK = -1
"""Requests that piecewise graphs on the prompts' SMs are told, which no others are."""
Builders = Sequence[tuple[SmkernMetadataBuilder, Any]]
"""Each group's builder, and the group."""


@dataclass(slots=True)
class DecodeGraph:
    """A captured decode step.

    Attributes:
        graph: Runs on the decode side's SMs, whatever stream launches it.
        hidden: [rows, hidden], what it writes.
        steps: Its metadata, a group each: lengths of its own, plans that are made anew in place.
    """

    graph: PartitionGraph
    hidden: Tensor
    steps: list[SmkernMetadata]


class SplitForward:
    """Stands in for a model's forward.

    Decode rows are a graph on their SMs, captured for some counts of rows. Prompts run on the other
    SMs meanwhile: those of few tokens by vLLM's piecewise graphs, captured there once more. Both
    begin behind all that vLLM's stream had, and that stream goes on behind both.

    Args:
        runner: vLLM's V2 model runner, its graphs captured.
        builders: Of all attention groups.
        decode_sms: SMs of the decode rows.
    """

    def __init__(self, runner: Any, builders: Builders, decode_sms: int) -> None:
        self._runner, self._builders = runner, builders
        self._forward = runner.model.forward
        self._ladder = smkern.ladder([decode_sms])
        self._decode, self._prefill = self._ladder.split(decode=decode_sms)
        self._began, self._decoded, self._prefilled = (torch.cuda.Event() for _ in range(3))
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._pieces: list[int] = []
        self._steps = 0
        self._ids, self._positions = (
            torch.zeros_like(x)
            for x in (runner.input_buffers.input_ids, runner.input_buffers.positions)
        )

    def install(self) -> None:
        """Compile and capture what steps will launch, then take the forward's place."""
        self._warm()
        compilation = self._runner.vllm_config.compilation_config
        captured = sorted(compilation.cudagraph_capture_sizes, reverse=True)
        sizes = [size for size in captured if size <= self._runner.max_num_reqs]
        if compilation.cudagraph_mode.has_piecewise_cudagraphs():
            for size in captured:
                self._capture_pieces(size)
            self._pieces = captured[::-1]
        for size in sizes:
            self._graphs[size] = self._capture(size)
        for builder, _ in self._builders:
            builder.max_rows_apart = max(sizes)
        self._runner.model.forward = self

    def verify(self) -> dict[str, int]:
        """See `Worker.verify_split`."""
        for side in (self._decode, self._prefill):
            side.verify()
        return {
            "decode_sms": self._decode.num_sms,
            "prefill_sms": self._prefill.num_sms,
            "steps": self._steps,
        }

    def _warm(self) -> None:
        """Compile what linear layers launch on both sides."""
        modules = self._runner.model.modules()
        methods = ((getattr(x, "quant_method", None), x) for x in modules)
        weights = [x.weight for method, x in methods if isinstance(method, SmkernLinearMethod)]
        shapes = list(dict.fromkeys((int(w.shape[0]), int(w.shape[1])) for w in weights))
        sides = ((self._decode, self._runner.max_num_reqs), (self._prefill, self._most_tokens))
        for side, max_m in sides if shapes else ():
            smkern.warmup(
                shapes=shapes, budgets=[side], max_m=max_m, dtypes=[weights[0].dtype],
                workers=1, progress=False,
            )  # fmt: skip

    @property
    def _most_tokens(self) -> int:
        return int(self._runner.vllm_config.scheduler_config.max_num_batched_tokens)

    def _capture(self, rows: int) -> DecodeGraph:
        buffers, tables = self._runner.input_buffers, self._runner.block_tables.input_block_tables
        device = buffers.input_ids.device
        inputs = self._buffered(rows, {}) | {
            "input_ids": buffers.input_ids[:rows],
            "positions": buffers.positions[..., :rows],
        }
        with self._decode:
            steps = [
                SmkernMetadata(
                    rows, tables[group.kv_cache_group_id][:rows],
                    torch.zeros(rows, dtype=torch.int32, device=device), None, 1, {},
                    builder.max_context,
                )
                for builder, group in self._builders
            ]  # fmt: skip
            for (builder, _), step in zip(self._builders, steps, strict=True):
                builder.plan(step)
            self._run(steps, rows, inputs)  # loads what is compiled
            torch.cuda.synchronize(device)
        with self._decode.capture(self._pool) as graph:
            hidden = self._run(steps, rows, inputs)
        return DecodeGraph(graph, hidden, steps)

    def _capture_pieces(self, tokens: int) -> None:
        """Capture vLLM's piecewise graphs of so many tokens on the prompts' SMs."""
        with self._prefill:
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
                self._run(None, tokens, self._buffered(tokens, {}), mode)
            torch.cuda.synchronize(self._ids.device)

    def _buffered(self, tokens: int, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs of so many tokens where graphs read them."""
        given = {"intermediate_tensors": None, "inputs_embeds": None, **inputs}
        where = {"input_ids": self._ids[:tokens], "positions": self._positions[..., :tokens]}
        return given | where

    def __call__(self, **inputs: Any) -> Any:
        """The model's hidden states, [tokens, hidden]."""
        found = get_forward_context().attn_metadata
        wanted = self._step_of(found, self._builders[0][1]) if isinstance(found, dict) else None
        if wanted is None or not wanted.decode_rows:
            return self._forward(**inputs)
        main, rows = torch.cuda.current_stream(), wanted.decode_rows
        self._steps += 1
        self._began.record(main)
        steps = [self._step_of(found, group) for _, group in self._builders]
        size = min(size for size in self._graphs if size >= rows)
        decoded = self._replay(self._graphs[size], steps, rows)
        hidden = self._prompts(steps, rows, wanted.num_tokens, inputs)
        main.wait_event(self._decoded)
        main.wait_event(self._prefilled)
        hidden.record_stream(main)
        return torch.cat([decoded[:rows], hidden])

    @staticmethod
    def _step_of(found: dict[str, Any], group: Any) -> SmkernMetadata:
        step: SmkernMetadata = found[group.layer_names[0]]
        return step

    def _replay(self, kept: DecodeGraph, steps: Sequence[SmkernMetadata], rows: int) -> Tensor:
        """Launch the decode rows; rows of padding have no keys, so they read and write none."""
        with self._decode:
            self._decode.stream.wait_event(self._began)
            for (builder, _), mine, step in zip(self._builders, kept.steps, steps, strict=True):
                mine.kv_lens[:rows].copy_(step.kv_lens[:rows])
                mine.kv_lens[rows:].zero_()
                builder.plan(mine, mine.plans)
            kept.graph.replay()
            self._decoded.record(self._decode.stream)
        return kept.hidden

    def _prompts(
        self, steps: Sequence[SmkernMetadata], rows: int, tokens: int, inputs: dict[str, Any]
    ) -> Tensor:
        """Launch the others on their SMs."""
        count = tokens - rows
        size = next((size for size in self._pieces if size >= count), None)
        with self._prefill:
            self._prefill.stream.wait_event(self._began)
            behind = [behind_rows(step, rows) for step in steps]
            for (builder, _), step in zip(self._builders, behind, strict=True):
                builder.plan(step)
            self._ids[:count].copy_(inputs["input_ids"][rows:tokens])
            self._positions[..., :count].copy_(inputs["positions"][..., rows:tokens])
            mode = CUDAGraphMode.NONE if size is None else CUDAGraphMode.PIECEWISE
            hidden = self._run(behind, size or count, self._buffered(size or count, inputs), mode)
            self._prefilled.record(self._prefill.stream)
        return hidden[:count]

    def _run(
        self,
        steps: Sequence[SmkernMetadata] | None,
        tokens: int,
        inputs: dict[str, Any],
        mode: Any = CUDAGraphMode.NONE,
    ) -> Tensor:
        """The forward of a step, on the current stream; without one attention gives zeros."""
        metadata = None
        if steps is not None:
            metadata = {
                name: step
                for (_, group), step in zip(self._builders, steps, strict=True)
                for name in group.layer_names
            }
        with set_forward_context(
            metadata, self._runner.vllm_config, num_tokens=tokens, cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(tokens, num_reqs=MARK), slot_mapping={},
        ):  # fmt: skip
            hidden: Tensor = self._forward(**inputs)
        return hidden


def behind_rows(step: SmkernMetadata, rows: int) -> SmkernMetadata:
    """What is left of a step behind its first rows, which have one token each."""
    assert step.cu_q_lens is not None
    return SmkernMetadata(
        step.num_tokens - rows, step.page_table[rows:], step.kv_lens[rows:],
        step.cu_q_lens[rows:] - rows, step.max_q_len, {}, step.max_kv_len,
    )  # fmt: skip


__all__ = ["DecodeGraph", "SplitForward", "behind_rows"]
