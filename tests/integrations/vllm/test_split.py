"""Decode rows beside prompts: a toy model run by vLLM's calls, split and whole, on CPU tensors.

What stands in for a partition runs at once; a graph runs again what was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smkern
from tests.integrations.vllm import stubs

HEADS, KV_HEADS, DIM, VOCAB, BLOCK, CONTEXT, ROWS = 2, 1, 64, 50, 16, 128, 8
CAPTURED = (1, 2, 4, 8, 16)


class Side:
    """A partition's stand-in."""

    recording: list[Callable[[], None]] | None = None
    stream = SimpleNamespace(wait_event=lambda event: None)

    def __init__(self, num_sms: int) -> None:
        self.num_sms, self.verified = num_sms, 0

    def verify(self) -> None:
        self.verified += 1

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @contextmanager
    def capture(self, pool: Any) -> Iterator[Any]:
        Side.recording = calls = []
        yield SimpleNamespace(replay=lambda: [call() for call in calls])
        Side.recording = None


@pytest.fixture(autouse=True)
def _stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    event = SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Side.stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    sides = SimpleNamespace(split=lambda decode: (Side(decode), Side(132 - decode)))
    monkeypatch.setattr(smkern, "ladder", lambda rungs: sides)
    with stubs.stubbed():
        yield


class Toy(nn.Module):
    """Two layers of attention over blocks; notes how many tokens each run had, and how it ran."""

    def __init__(self) -> None:
        from smkern.integrations.vllm.backend import SmkernBackend, SmkernImpl

        super().__init__()
        draw = torch.Generator().manual_seed(1)
        width = HEADS * DIM
        self.embed = torch.randn(VOCAB, width, generator=draw)
        self.where = torch.randn(CONTEXT, width, generator=draw)
        sizes = (width, (HEADS + 2 * KV_HEADS) * DIM)
        self.weights = [torch.randn(sizes, generator=draw) * width**-0.5 for _ in range(2)]
        shape = SmkernBackend.get_kv_cache_shape(ROWS * CONTEXT // BLOCK + 1, BLOCK, KV_HEADS, DIM)
        self.caches = [torch.full(shape, float("nan")) for _ in self.weights]
        self.layers = {
            f"layer{i}": SimpleNamespace(
                impl=SmkernImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, window)
            )
            for i, window in enumerate((None, 20))
        }
        self.runs: list[tuple[int, str]] = []

    def forward(self, input_ids: Tensor, positions: Tensor, **others: Any) -> Tensor:
        assert not any(x is not None for x in others.values())
        context = stubs.CONTEXTS[-1]
        self.runs.append((len(input_ids), getattr(context, "cudagraph_runtime_mode", "whole")))
        x = self.embed[input_ids.long()] + self.where[positions]
        counts = (HEADS, KV_HEADS, KV_HEADS)
        for cache, weight, name in zip(self.caches, self.weights, self.layers, strict=True):
            parts = (x @ weight).view(len(x), -1, DIM).split(counts, 1)
            found = context.attn_metadata
            out = torch.full((len(x), HEADS, DIM), float("nan"))
            layer = self.layers[name]
            layer.impl.forward(layer, *parts, cache, found and found[name], out)
            x = x + out.flatten(1)
        return x


class Runner:
    """vLLM's model runner around a toy: requests' lengths, buffers, steps."""

    def __init__(self, *, has_pieces: bool = True) -> None:
        from smkern.integrations.vllm.metadata import SmkernMetadataBuilder

        self.model, self.max_num_reqs = Toy(), ROWS
        self.vllm_config = stubs.config(self.model.layers, CONTEXT)
        self.vllm_config.scheduler_config = SimpleNamespace(max_num_batched_tokens=64)
        compilation = self.vllm_config.compilation_config
        compilation.cudagraph_capture_sizes = list(CAPTURED)
        compilation.cudagraph_mode = SimpleNamespace(has_piecewise_cudagraphs=lambda: has_pieces)
        zeros = torch.zeros(64)
        self.input_buffers = SimpleNamespace(input_ids=zeros.int(), positions=zeros.long())
        table = torch.zeros(ROWS, CONTEXT // BLOCK).int()
        self.block_tables = SimpleNamespace(input_block_tables=[table])
        self.group = SimpleNamespace(kv_cache_group_id=0, layer_names=[*self.model.layers])
        self.builder = SmkernMetadataBuilder(
            SimpleNamespace(block_size=BLOCK), self.group.layer_names, self.vllm_config,
            torch.device("cpu"),
        )  # fmt: skip
        self.lengths: dict[int, int] = {}

    def split(self) -> Runner:
        """Have decode rows run apart from now on."""
        from smkern.integrations.vllm.split import SplitForward

        class Noting(SplitForward):
            def _run(self, *given: Any) -> Tensor:
                hidden = super()._run(*given)
                if Side.recording is not None:
                    Side.recording.append(lambda: hidden.copy_(super(Noting, self)._run(*given)))
                return hidden

        Noting(self, [(self.builder, self.group)], 48).install()
        return self

    def step(self, new: dict[int, int], draw: Random) -> Tensor:
        """Hidden states of some new tokens of some requests, decode rows in front."""
        buffers, table = self.input_buffers, self.block_tables.input_block_tables[0]
        starts, lens = [0], []
        for row, (request, count) in enumerate(new.items()):
            old = self.lengths.get(request, 0)
            part = slice(starts[-1], starts[-1] + count)
            ids = [draw.randrange(VOCAB) for _ in range(count)]
            buffers.input_ids[part] = torch.tensor(ids).int()
            buffers.positions[part] = torch.arange(old, old + count)
            blocks = CONTEXT // BLOCK
            table[row] = torch.arange(1 + request * blocks, 1 + (request + 1) * blocks)
            self.lengths[request] = old + count
            starts.append(part.stop)
            lens.append(old + count)
        n = starts[-1]
        common = stubs.CommonAttentionMetadata(
            torch.tensor(starts).int(), torch.tensor(lens).int(), len(new), n, max(new.values()),
            max(lens), table[: len(new)],
        )  # fmt: skip
        step = self.builder.build(0, common)
        metadata = dict.fromkeys(self.group.layer_names, step)
        with stubs.set_forward_context(metadata, self.vllm_config):
            return self.model.forward(
                input_ids=buffers.input_ids[:n], positions=buffers.positions[:n],
                intermediate_tensors=None, inputs_embeds=None,
            )  # fmt: skip


STEPS = [
    {0: 20, 1: 5}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 9}, {1: 1, 2: 30}, {0: 1, 1: 1, 2: 1, 3: 17, 4: 2},
    {4: 1, 0: 1, 3: 1, 1: 1}, {5: 3, 6: 40}, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 25},
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 7: 6, 5: 8},
]  # fmt: skip


@pytest.mark.parametrize("has_pieces", [True, False])
def test_a_split_step_is_the_whole_one(has_pieces: bool) -> None:
    """And what either leaves in the cache is what the next step reads."""
    whole, split = Runner(), Runner(has_pieces=has_pieces).split()
    one, other = Random(1), Random(1)
    for new in STEPS:
        expected, found = whole.step(new, one), split.step(new, other)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for mine, its in zip(split.model.caches, whole.model.caches, strict=True):
        torch.testing.assert_close(mine[1:], its[1:], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_rows_run_by_the_next_larger_graph_and_prompts_by_pieces_that_hold_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both behind plans of this step's lengths: the graph's anew in place."""
    split, draw = Runner().split(), Random(1)
    split.step({0: 20, 1: 5, 2: 7}, draw)
    split.model.runs.clear()
    plan, planned = split.builder.plan, []
    monkeypatch.setattr(
        split.builder, "plan", lambda step, out=None: (planned.append(out), plan(step, out))
    )
    split.step({0: 1, 1: 1, 2: 1, 3: 9}, draw)
    assert split.model.runs == [(4, "none"), (16, "piecewise")]
    assert [len(out) if out else None for out in planned] == [2, None]
    split.model.runs.clear()
    split.step({0: 1, 1: 1, 4: 17}, draw)  # more than pieces hold
    assert split.model.runs == [(2, "none"), (17, "none")]


@pytest.mark.parametrize("new", [{0: 1, 1: 1}, {4: 3, 5: 4}], ids=["rows", "prompts"])
def test_a_step_of_one_kind_is_not_split(new: dict[int, int]) -> None:
    split, draw = Runner().split(), Random(1)
    split.step({0: 20, 1: 5}, draw)
    split.model.runs.clear()
    split.step(new, draw)
    assert split.model.runs == [(sum(new.values()), "whole")]


def test_split_steps_are_counted_and_both_sides_verified() -> None:
    split, draw = Runner().split(), Random(1)
    for new in ({0: 20, 1: 5}, {0: 1, 1: 1, 2: 9}, {0: 1, 1: 1}, {0: 1, 3: 40}):
        split.step(new, draw)
    forward = split.model.forward
    assert forward.verify() == {"decode_sms": 48, "prefill_sms": 84, "steps": 2}
    assert forward._decode.verified == forward._prefill.verified == 1
