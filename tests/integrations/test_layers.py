"""A model of transformers as embed, layer(i) and head over pages, beside the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import smkern.integrations.transformers as st
from smkern.errors import ArgumentError, ConfigError
from smkern.integrations.transformers.turns import positions_of
from smkern.models import DecodeGraph, DecodeInputs
from smkern.models.layered import forward
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.sim.device import SimDevice
from tests.models.peers import FAMILIES, Peer, make_peer, prompts
from tests.models.session import Session

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Peer, st.Layers]:
    """transformers' own attention, and the same weights behind `Layers`."""
    return make(request.param)


def make(family: str) -> tuple[Peer, st.Layers]:
    torch.manual_seed(2)
    peer = make_peer(family)
    other = make_peer(family)
    other.model.load_state_dict(peer.model.state_dict())
    return peer, st.Layers(other.model)


def session(layers: Any, batch: int) -> Session:
    return Session.make(layers, batch)


def logits(session: Session, chunks: Sequence[Sequence[int]], *, ragged: bool = True) -> Any:
    return forward(session.decoder, session.step(chunks, ragged=ragged)).clone()


def want(peer: Peer, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.stack([peer.logits(text, 1)[0] for text in texts])


def test_prompts_chunks_and_decoded_tokens(pair) -> None:
    peer, layers = pair
    texts, now = prompts((20, 3, 33)), session(layers, 3)
    torch.testing.assert_close(
        logits(now, [x[:2] for x in texts]), want(peer, [x[:2] for x in texts]), **CLOSE
    )
    torch.testing.assert_close(logits(now, [x[2:] for x in texts]), want(peer, texts), **CLOSE)
    for token in (7, 8):
        texts = [[*text, token] for text in texts]
        got = logits(now, [[token]] * 3, ragged=False)
        torch.testing.assert_close(got, want(peer, texts), **CLOSE)


def test_tokens_of_a_decode_graph(pair) -> None:
    peer, layers = pair
    texts, now = prompts((20, 3, 33)), session(layers, 4)
    first = logits(now, [*texts, [1]]).argmax(-1)
    inputs = DecodeInputs.make(4, now.page_table, max_kv_len=200)
    graph = DecodeGraph(layers, inputs, now.caches, max_kv_len=200)
    inputs.token_ids.copy_(first)
    inputs.kv_lens.copy_(torch.tensor(now.lengths) + 1)
    inputs.finished.copy_(torch.tensor([False, False, False, True]))
    got = torch.empty(5, 4, dtype=torch.int32)
    graph.replay(5, into=got)
    for row, text in enumerate(texts):
        text = [*text, int(first[row])]
        for token in got[:, row].tolist():
            best = peer.logits(text, 1)[0]
            assert best[token] >= best.max() - 1e-4
            text.append(token)


def test_the_interleaver_launches_layers_of_one_request_beside_steps_of_another(pair) -> None:
    peer, layers = pair
    (text, other), device = prompts((30, 9)), SimDevice(132, (32,))
    decoding, beginning, lanes = session(layers, 1), session(layers, 1), Interleaver(device)
    about = {"us": 10.0}
    drawn = [int(logits(decoding, [other]).argmax())]
    step = beginning.step([text]).planned()
    lanes.aim(32)
    lanes.launch("prefill", Work("embed", lambda _: layers.embed(step), about=about))
    for index in range(layers.config.num_layers):
        lanes.launch(
            "prefill", Work("layer", lambda _, i=index: layers.layer(i, step), about=about)
        )
        one = decoding.step([drawn[-1:]], ragged=False)
        work = Work("decode", lambda _, one=one: forward(layers, one), about=about)
        ticket = lanes.launch("decode", work)
        while not ticket.is_over:
            lanes.wait()
            lanes.poll()
        drawn.append(int(one.buffers.logits.argmax()))
    lanes.launch("prefill", Work("head", lambda _: layers.head(step), about=about))
    lanes.drain()
    torch.testing.assert_close(step.buffers.logits, want(peer, [text]), **CLOSE)
    for count in range(len(drawn)):
        best = peer.logits([*other, *drawn[:count]], 1)[0]
        assert best[drawn[count]] >= best.max() - 1e-4


def test_the_model_goes_on_by_itself(pair) -> None:
    peer, layers = pair
    ids = torch.tensor(prompts((12,)))
    got, wanted = (
        model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=ids >= 0)
        for model in (layers.model, peer.model)
    )
    assert torch.equal(got, wanted)


def test_modules_of_another_class_run() -> None:
    class Doubled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    torch.manual_seed(2)
    peer, other = make_peer("llama"), make_peer("llama")
    for x in (peer, other):
        x.model.load_state_dict(peer.model.state_dict())
        x.model.model.embed_tokens.__class__ = Doubled
    now = session(st.Layers(other.model), 1)
    (text,) = prompts((9,))
    torch.testing.assert_close(logits(now, [text]), want(peer, [text]), **CLOSE)


def test_bad_input() -> None:
    peer, layers = make("llama")
    now = session(layers, 2)
    with pytest.raises(ArgumentError, match=r"call embed\(step\) first"):
        layers.layer(0, now.step([[1], [2]]))
    short = st.Layers(peer.model, max_position=100)
    with pytest.raises(ArgumentError, match=r"max_kv_len=256: .* made for 100 positions"):
        short.embed(now.step([[1], [2]]))
    with pytest.raises(ArgumentError, match=r"max_position=513: .* has 512"):
        st.Layers(peer.model, max_position=513)
    with pytest.raises(ConfigError, match="has 2 layers, its configuration 3"):
        st.Layers(peer.model, config=layers.config.replace(num_layers=3))
    with pytest.raises(ArgumentError, match=r"call model\.eval"):
        st.Layers(make_peer("llama").model.train())


def test_a_sliding_window_is_refused() -> None:
    from tests.integrations.families import model_of

    with pytest.raises(ConfigError, match="choose a model"):
        st.Layers(model_of("Mistral", "eager"))


def test_a_layer_with_an_attention_of_its_own_is_refused() -> None:
    _, layers = make("llama")
    (text,), now = prompts((5,)), session(layers, 1)
    step = now.step([text])
    layers.embed(step)
    attention = layers._parts.layers[0].self_attn
    attention.forward = lambda hidden_states, **options: (hidden_states, None)
    with pytest.raises(ConfigError, match="calls one of its own"):
        layers.layer(0, step)


def test_positions_of_ragged_steps_with_padding() -> None:
    """A chunk of three behind two, one that has none, a single token; two tokens are nobody's."""
    _, layers = make("llama")
    step = session(layers, 3).step([[1] * 3, [1] * 2, [1]])
    step = replace(
        step, kv_lens=torch.tensor([5, 7, 9]).int(), cu_q_lens=torch.tensor([0, 3, 3, 4]).int()
    )
    assert positions_of(step).tolist()[:4] == [2, 3, 4, 8]
    assert all(0 <= position < step.max_kv_len for position in positions_of(step).tolist())
    alone = replace(step, cu_q_lens=None, kv_lens=torch.tensor([5, 0, 9]).int())
    assert positions_of(alone).tolist() == [4, 0, 8]


def test_steps_side_by_side_keep_their_own_turns() -> None:
    """And a step that needs more room leaves a smaller one's graph what it reads."""
    peer, layers = make("qwen3")
    (text, other), first, second = prompts((20, 7)), session(layers, 1), session(layers, 1)
    steps = [first.step([text]).planned(), second.step([other]).planned()]
    for step in steps:
        layers.embed(step)
    for index in range(layers.config.num_layers):
        for step in steps:
            layers.layer(index, step)
    for step, ids in zip(steps, (text, other), strict=True):
        torch.testing.assert_close(layers.head(step), want(peer, [ids]), **CLOSE)
    kept = layers._turns.get(steps[1])
    assert kept is not None
    before = kept[0].clone()
    layers.embed(second.step([[1] * 100]))
    assert torch.equal(kept[0], before)
