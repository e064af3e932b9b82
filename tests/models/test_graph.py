"""Decode steps whose inputs advance by themselves; on CPU tensors nothing is captured."""

from __future__ import annotations

import pytest
import torch

from smkern.bench.model.host_cost import layer_launch_us
from smkern.errors import ArgumentError
from smkern.models import DecodeGraph, DecodeInputs
from tests.models.peers import Peer, prompts
from tests.models.session import Session

pytestmark = pytest.mark.slow

PAD = 0
COUNTS = (20, 3, 33)


def _start(peer: Peer, steps: int):
    """A session whose prompts are cached, its graph, and the tokens that a loop would draw."""
    decoder, texts = peer.decoder(), prompts(COUNTS)
    session = Session.make(decoder, len(texts))
    want = [session.logits(texts).argmax(-1)]
    lengths = torch.tensor(session.lengths).int()
    for _ in range(steps):
        chunks = [[token] for token in want[-1].tolist()]
        want.append(session.logits(chunks, ragged=False).argmax(-1))
    session = Session.make(decoder, len(texts))
    first = session.logits(texts).argmax(-1)
    inputs = DecodeInputs.make(len(texts), session.page_table, max_kv_len=200)
    graph = DecodeGraph(decoder, inputs, session.caches, max_kv_len=200)
    inputs.token_ids.copy_(first)
    inputs.kv_lens.copy_(lengths + 1)
    inputs.finished.fill_(False)
    return graph, torch.stack(want[1:]).int()


def test_replays_back_to_back(peer: Peer):
    graph, want = _start(peer, 6)
    got = torch.empty_like(want)
    graph.replay(4, into=got[:4])
    graph.replay(2, into=got[4:])
    assert torch.equal(got, want)
    assert torch.equal(graph.inputs.token_ids, want[-1])
    assert graph.inputs.kv_lens.tolist() == [n + 7 for n in COUNTS]


def test_rows_finish_by_length_and_by_stop_token(peer: Peer):
    graph, want = _start(peer, 5)
    graph.inputs.max_lengths[0] = COUNTS[0] + 3
    graph.inputs.stop_tokens[1, 2] = want[0, 1]
    got = torch.empty_like(want)
    graph.replay(5, into=got)
    assert got[:2, 0].tolist() == want[:2, 0].tolist()
    assert got[2:, 0].tolist() == [PAD] * 3
    assert got[:, 1].tolist() == [int(want[0, 1]), *[PAD] * 4]
    assert torch.equal(got[:, 2], want[:, 2])
    assert graph.inputs.finished.tolist() == [True, True, False]
    assert graph.inputs.kv_lens.tolist() == [COUNTS[0] + 3, COUNTS[1] + 2, COUNTS[2] + 6]


def test_finished_rows_write_nothing(peer: Peer):
    """Their pages may be another's by then."""
    graph, _ = _start(peer, 1)
    graph.inputs.finished.fill_(True)
    before = [(k.clone(), v.clone()) for k, v in graph.step.caches]
    graph.replay(2)
    for now, old in zip(graph.step.caches, before, strict=True):
        for x, y in zip(now, old, strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
    assert graph.inputs.token_ids.tolist() == [PAD] * 3
    assert graph.inputs.kv_lens.tolist() == [n + 1 for n in COUNTS]


def test_bad_input(peer: Peer):
    graph, _ = _start(peer, 1)
    with pytest.raises(ArgumentError, match=r"into has shape \[2, 2\], wanted \[2, 3\]"):
        graph.replay(2, into=torch.empty(2, 2).int())
    table = graph.inputs.page_table
    with pytest.raises(ArgumentError, match=r"wanted \[4, max_pages\]"):
        DecodeInputs.make(4, table, max_kv_len=10)
    with pytest.raises(ArgumentError, match=r"int64, wanted torch\.int32"):
        DecodeInputs.make(3, table.long(), max_kv_len=10)


def test_host_cost(peer: Peer):
    graph, _ = _start(peer, 1)
    assert layer_launch_us(graph.decoder, graph.step, rounds=1) > 0
