"""Decode graphs: nothing allocated or loaded in a replay, rows that finish, sampling."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

import smkern
from smkern.models import Decoder, Weights, preset
from tests.gpu.models.support import MOST, decode_graph, small_weights
from tests.models.peers import FAMILIES, prompts
from tests.models.session import Session

COUNTS = (5, 64, 100)
PAD = 0


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    weights = small_weights(request.param)
    return Decoder(weights.config, weights)


def _begun(decoder: Decoder) -> tuple[Session, torch.Tensor]:
    """Requests whose prompts are cached, and their next tokens."""
    session = Session.make(decoder, len(COUNTS), MOST)
    first = session.logits(prompts(COUNTS)).argmax(-1)
    return session, first


@pytest.mark.parametrize("num_sms", [None, 16, 48])
def test_replays_allocate_and_load_nothing(decoder: Decoder, num_sms: int | None):
    session, first = _begun(decoder)
    with ExitStack() as opened:
        partition = None
        if num_sms is not None:
            ladder = opened.enter_context(smkern.ladder([num_sms]))
            partition = ladder.split(decode=num_sms).decode
        graph = decode_graph(session, first, partition=partition)
        tokens = torch.zeros(40, len(COUNTS), dtype=torch.int32, device="cuda")
        graph.replay(into=tokens[:1])
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats(), smkern.counters()
        for at in range(1, 40, 13):
            graph.replay(13, into=tokens[at : at + 13])
        (partition or torch.cuda).synchronize()
        after = torch.cuda.memory_stats(), smkern.counters()
        name = "allocation.all.allocated"
        assert after[0][name] == before[0][name]
        assert after[1] == before[1]
        assert graph.inputs.kv_lens.tolist() == [n + 41 for n in COUNTS]
        assert torch.equal(graph.inputs.token_ids, tokens[-1])
        graph.close()
        del graph


def test_capture_leaves_inputs_and_caches_alone(decoder: Decoder):
    session, first = _begun(decoder)
    before = [(k.clone(), v.clone()) for k, v in session.caches]
    graph = decode_graph(session, first)
    assert torch.equal(graph.inputs.token_ids, first.int())
    for now, old in zip(session.caches, before, strict=True):
        for x, y in zip(now, old, strict=True):
            assert torch.equal(x.view(torch.int16), y.view(torch.int16))
    graph.close()


def test_rows_finish_on_the_device(decoder: Decoder):
    session, first = _begun(decoder)
    graph = decode_graph(session, first)
    want = torch.empty(6, len(COUNTS), dtype=torch.int32, device="cuda")
    graph.replay(6, into=want)
    graph.inputs.token_ids.copy_(first)
    graph.inputs.kv_lens.copy_(torch.tensor(COUNTS) + 1)
    graph.inputs.max_lengths[0] = COUNTS[0] + 3
    stop = int(want[2, 1])
    at = want[:, 1].tolist().index(stop)
    graph.inputs.stop_tokens[1, 1] = stop
    got = torch.empty_like(want)
    graph.replay(6, into=got)
    torch.cuda.synchronize()
    assert got[:, 0].tolist() == [*want[:2, 0].tolist(), *[PAD] * 4]
    assert got[:, 1].tolist() == [*want[: at + 1, 1].tolist(), *[PAD] * (5 - at)]
    assert torch.equal(got[:, 2], want[:, 2])
    assert graph.inputs.finished.tolist() == [True, True, False]
    kv_lens = [COUNTS[0] + 3, COUNTS[1] + 2 + at, COUNTS[2] + 7]
    assert graph.inputs.kv_lens.tolist() == kv_lens
    graph.close()


def test_sampling_follows_from_seed_and_position(decoder: Decoder):
    session, first = _begun(decoder)
    graph = decode_graph(session, first)
    graph.inputs.temperature.fill_(1.0)
    graph.inputs.top_p.fill_(0.95)
    graph.inputs.seeds.copy_(torch.tensor([1, 2, 3]))
    runs = []
    for seed in (3, 3, 4):
        graph.inputs.token_ids.copy_(first)
        graph.inputs.kv_lens.copy_(torch.tensor(COUNTS) + 1)
        graph.inputs.seeds[2] = seed
        runs.append(torch.empty(24, len(COUNTS), dtype=torch.int32, device="cuda"))
        graph.replay(24, into=runs[-1])
    torch.cuda.synchronize()
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0][:, :2], runs[2][:, :2])
    assert not torch.equal(runs[0][:, 2], runs[2][:, 2])
    graph.close()


def test_random_weights_are_drawn_on_the_device():
    config = preset("qwen3-8b").replace(num_layers=8)
    weights = Weights.random(config, 1, "cuda")
    assert weights.layers[7].qkv.float().std().item() == pytest.approx(0.02, rel=0.01)
    again = Weights.random(config.replace(num_layers=1), 1, "cuda")
    assert torch.equal(again.layers[0].qkv, weights.layers[0].qkv)
