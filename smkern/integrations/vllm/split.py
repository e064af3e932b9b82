"""A model's forward whose decode rows and prompts run beside each other on disjoint SMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, set_forward_context

import smkern
from smkern.integrations.vllm.linear import SmkernLinearMethod
from smkern.integrations.vllm.metadata import SmkernMetadata, SmkernMetadataBuilder
from smkern.partition.partition import PartitionGraph

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

    Decode rows are a graph on their SMs, captured for some counts of rows; prompts run on the other
    SMs meanwhile, launch by launch. Both begin behind all that vLLM's stream had, and that stream
    goes on behind both.

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

    def install(self) -> None:
        """Compile and capture what steps will launch, then take the forward's place."""
        self._warm()
        compilation = self._runner.vllm_config.compilation_config
        most = self._runner.max_num_reqs
        sizes = [size for size in compilation.cudagraph_capture_sizes if size <= most]
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._capture(size)
        for builder, _ in self._builders:
            builder.max_rows_apart = max(sizes)
        self._runner.model.forward = self

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
        inputs = {
            "input_ids": buffers.input_ids[:rows],
            "positions": buffers.positions[..., :rows],
            "intermediate_tensors": None,
            "inputs_embeds": None,
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

    def __call__(self, **inputs: Any) -> Any:
        """The model's hidden states, [tokens, hidden]."""
        found = get_forward_context().attn_metadata
        wanted = self._step_of(found, self._builders[0][1]) if isinstance(found, dict) else None
        if wanted is None or not wanted.decode_rows:
            return self._forward(**inputs)
        main, rows = torch.cuda.current_stream(), wanted.decode_rows
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
        given = {
            name: x[..., rows:tokens] if name in ("input_ids", "positions") else x
            for name, x in inputs.items()
        }
        with self._prefill:
            self._prefill.stream.wait_event(self._began)
            behind = [behind_rows(step, rows) for step in steps]
            for (builder, _), step in zip(self._builders, behind, strict=True):
                builder.plan(step)
            hidden = self._run(behind, tokens - rows, given)
            self._prefilled.record(self._prefill.stream)
        return hidden

    def _run(self, steps: Sequence[SmkernMetadata], tokens: int, inputs: dict[str, Any]) -> Tensor:
        metadata = {
            name: step
            for (_, group), step in zip(self._builders, steps, strict=True)
            for name in group.layer_names
        }
        config = self._runner.vllm_config
        with set_forward_context(metadata, config, num_tokens=tokens, slot_mapping={}):
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
