"""A decoder's bits follow from a request alone: not from the batch, the budget, nor the cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

import smkern
from smkern.models import ActivationBuffers, Decoder, ModelConfig, Step, Weights, preset
from tests.gpu.bits import same_bits
from tests.gpu.models.support import DEVICE, decode_graph
from tests.gpu.sides import sides
from tests.models.session import Session

PAGE = 16
LONGEST = 1024
"""Tokens of a request."""
REQUESTS = 128
BUDGETS = (16, 48, 116, 132)
BATCHES = (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 64, 77, 100, 127, 128)
PROMPTS = (1, 5, 8, 9, 17, 64, 129, 300, 511, 1000)
CUTS = {
    "halves": lambda n: (0, n // 2, n) if n > 17 else (0, n),
    "chunks of 100": lambda n: (*range(0, n - 8, 100), n) if n > 8 else (0, n),
    "one of 9 at the end": lambda n: (0, n - 9, n) if n > 17 else (0, n),
    "one of 9 in front": lambda n: (0, 9, n) if n > 17 else (0, n),
}
"""Where a prompt is cut; no chunk has 8 tokens or fewer, unless the prompt has."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder, pages of random keys and values, and requests that hold some of them."""

    decoder: Decoder
    activations: ActivationBuffers
    caches: list[tuple[Tensor, Tensor]]
    page_table: Tensor
    tokens: Tensor
    """[requests, longest]: a token a position."""
    lengths: list[int]
    """Of each request, where it decodes."""

    @classmethod
    def make(cls, config: ModelConfig, device: str = DEVICE, requests: int = REQUESTS) -> Model:
        decoder = Decoder(config, Weights.random(config, 5, device), batch_invariant=True)
        generator = torch.Generator().manual_seed(2)
        columns = LONGEST // PAGE
        shape = (requests * columns, PAGE, config.num_kv_heads, config.head_dim)
        caches = [
            (
                torch.randn(shape, device=device, dtype=config.dtype),
                torch.randn(shape, device=device, dtype=config.dtype),
            )
            for _ in range(config.num_layers)
        ]
        order = torch.randperm(requests * columns, generator=generator)
        tokens = torch.randint(config.vocab_size, (requests, LONGEST), generator=generator)
        lengths = torch.randint(1, LONGEST + 1, (requests,), generator=generator).tolist()
        activations = ActivationBuffers(config, 4096, requests, device)
        table = order.int().view(requests, columns).to(device)
        return cls(decoder, activations, caches, table, tokens.int().to(device), lengths)

    def run(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        ragged: bool = True,
        num_sms: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens starts..ends of some requests in one forward.

        Returns:
            The residual stream [rows, hidden] behind the last layer, and logits [rows, vocab].
        """
        device = self.tokens.device
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        spans = zip(rows, starts, ends, strict=True)
        sums = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        step = Step.make(
            self.activations,
            token_ids=torch.cat([self.tokens[row, start:end] for row, start, end in spans]),
            kv_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            page_table=self.page_table[list(rows)],
            caches=self.caches,
            max_kv_len=max(ends),
            cu_q_lens=sums if ragged else None,
            max_q_len=max(counts) if ragged else 1,
            num_sms=num_sms,
        )
        logits = self.decoder.forward(step).clone()
        last = step.buffers.last if ragged else step.buffers.hidden
        return last.clone(), logits

    def decode(self, batch: int, num_sms: int | None = None) -> tuple[Tensor, Tensor]:
        """A decode step of the first requests; their keys are written where they were."""
        ends = self.lengths[:batch]
        starts = [end - 1 for end in ends]
        return self.run(range(batch), starts, ends, ragged=False, num_sms=num_sms)

    def keys(self) -> list[Tensor]:
        return [x.clone() for pair in self.caches for x in pair]

    def spoil(self) -> None:
        """Keys and values that no request wrote."""
        for pair in self.caches:
            for x in pair:
                x.fill_(float("nan"))

    def written(self, row: int, length: int) -> list[Tensor]:
        """Keys and values of a request's tokens, of all layers."""
        pages = self.page_table[row].long()
        return [x[pages].flatten(0, 1)[:length].clone() for pair in self.caches for x in pair]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """Two layers of Qwen3-8B's widths."""
    made = Model.make(preset("qwen3-8b").replace(num_layers=2, max_position=LONGEST))
    yield made
    del made
    torch.cuda.empty_cache()


def all_same(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.fixture(scope="module")
def decoded(model: Model) -> tuple[Tensor, Tensor]:
    """Each request's decode step alone, on the whole device: residual streams and logits."""
    alone = [
        model.run([row], [end - 1], [end], ragged=False) for row, end in enumerate(model.lengths)
    ]
    hidden, logits = (torch.cat(found) for found in zip(*alone, strict=True))
    assert torch.isfinite(logits).all()
    assert len(logits.argmax(-1).unique()) > REQUESTS // 4, "the rows say the same"
    return hidden, logits


@pytest.mark.parametrize("num_sms", BUDGETS)
def test_decode_in_every_batch(model, decoded, num_sms) -> None:
    before, wrong = model.keys(), []
    for batch in BATCHES:
        found = model.decode(batch, num_sms)
        if not all_same(found, [x[:batch] for x in decoded]):
            wrong.append(batch)
    assert not wrong, f"batches {wrong} on {num_sms} SMs"
    assert all_same(model.keys(), before)


def test_decode_in_partitions(model: Model, decoded: tuple[Tensor, Tensor]) -> None:
    """Masks confine instead of grids, and launches may overlap."""
    wrong = []
    for side in sides():
        torch.cuda.synchronize()
        for batch in (1, 17, 64, 128):
            with side:
                found = model.decode(batch)
            side.synchronize()
            if not all_same(found, [x[:batch] for x in decoded]):
                wrong.append((side.num_sms, batch))
            del found  # a partition does not close under tensors of its stream
    assert not wrong, f"(SMs, batch): {wrong}"


@pytest.fixture(scope="module")
def prefilled(model: Model) -> list[tuple[list[Tensor], Tensor, Tensor]]:
    """Each prompt alone, whole, on the whole device: its keys, residual stream and logits."""
    model.spoil()
    found = []
    for row, count in enumerate(PROMPTS):
        hidden, logits = model.run([row], [0], [count])
        assert torch.isfinite(logits).all()
        found.append((model.written(row, count), hidden, logits[0]))
    return found


def differing(
    model: Model, prefilled: list[tuple[list[Tensor], Tensor, Tensor]], logits: Tensor
) -> list[int]:
    """Lengths of the prompts whose keys or logits [prompts, vocab] have other bits."""
    return [
        count
        for row, (count, (keys, _, want)) in enumerate(zip(PROMPTS, prefilled, strict=True))
        if not (same_bits(logits[row], want) and all_same(model.written(row, count), keys))
    ]


@pytest.mark.parametrize("num_sms", BUDGETS)
def test_prefill_together(model: Model, prefilled, num_sms: int) -> None:
    model.spoil()
    rows = range(len(PROMPTS))
    hidden, logits = model.run(rows, [0] * len(PROMPTS), PROMPTS, num_sms=num_sms)
    assert not differing(model, prefilled, logits)
    assert same_bits(hidden, torch.cat([alone for _, alone, _ in prefilled]))


@pytest.mark.parametrize("num_sms", BUDGETS)
@pytest.mark.parametrize("cut", CUTS)
def test_prefill_in_chunks(model: Model, prefilled, cut: str, num_sms: int) -> None:
    model.spoil()
    logits = torch.empty_like(torch.stack([want for *_, want in prefilled]))
    for row, count in enumerate(PROMPTS):
        for start, end in pairwise(CUTS[cut](count)):
            logits[row] = model.run([row], [start], [end], num_sms=num_sms)[1][0]
    assert not differing(model, prefilled, logits)


@pytest.mark.parametrize("num_sms", BUDGETS)
@pytest.mark.parametrize("batch", [1, 30, 100])
def test_chunks_and_decode_rows_in_one_forward(model, prefilled, batch, num_sms) -> None:
    """A mixed step: the second halves of the prompts, then requests that decode."""
    for pair in model.caches:
        for x in pair:
            x.normal_()
    first = len(PROMPTS)
    decoding = range(first, first + batch)
    ends = [model.lengths[row] for row in decoding]
    starts = [end - 1 for end in ends]
    alone = torch.cat(
        [
            model.run([row], [start], [end], ragged=False)[1]
            for row, start, end in zip(decoding, starts, ends, strict=True)
        ]
    )
    halves = [CUTS["halves"](count) for count in PROMPTS]
    long = [row for row, cut in enumerate(halves) if len(cut) == 3]
    for row in long:
        model.run([row], [0], [halves[row][1]], num_sms=num_sms)
    _, logits = model.run(
        [*range(first), *decoding],
        [*(cut[-2] for cut in halves), *starts],
        [*PROMPTS, *ends],
        num_sms=num_sms,
    )
    assert not differing(model, prefilled, logits[:first])
    assert same_bits(logits[first:], alone)


def test_decode_graphs_on_every_rung(model: Model) -> None:
    """Tokens and logits of graphs of other batches, captured on other partitions."""
    texts = [model.tokens[row, :count].tolist() for row, count in enumerate((3, 40, 200, 700))]
    steps = 12

    def run(rows: Sequence[int], partition: smkern.Partition | None) -> tuple[Tensor, Tensor]:
        session = Session.make(model.decoder, len(rows), LONGEST)
        first = session.logits([texts[row] for row in rows]).argmax(-1)
        graph = decode_graph(session, first, partition=partition)
        tokens = torch.empty(steps, len(rows), dtype=torch.int32, device=DEVICE)
        graph.replay(steps, into=tokens)
        (partition or torch.cuda).synchronize()
        found = tokens, graph.logits.clone()
        graph.close()
        return found

    alone = [run([row], None) for row in range(len(texts))]
    tokens = torch.cat([x for x, _ in alone], 1)
    logits = torch.cat([y for _, y in alone])
    with smkern.ladder([16, 48]) as ladder:
        for partition in (None, *(side for split in ladder for side in split)):
            got, behind = run(range(len(texts)), partition)
            where = partition and partition.num_sms
            assert torch.equal(got, tokens), f"on {where} SMs"
            assert same_bits(behind, logits), f"on {where} SMs"
