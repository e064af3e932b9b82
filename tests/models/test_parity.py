"""The whole decoder on CPU tensors against transformers' eager models."""

from __future__ import annotations

import pytest
import torch

from tests.models.peers import Peer, error, prompts
from tests.models.session import Session

pytestmark = pytest.mark.slow

COUNTS = (37, 5, 80)
"""Tokens of the requests' prompts."""
TIGHT = {"rtol": 2e-4, "atol": 2e-4}


def _want(peer: Peer, texts: list[list[int]]) -> torch.Tensor:
    return peer.last_logits(texts, torch.float32)


def test_prefill(peer: Peer):
    texts = prompts(COUNTS)
    got = Session.make(peer.decoder(), len(texts)).logits(texts)
    torch.testing.assert_close(got, _want(peer, texts), **TIGHT)


def test_prefill_in_chunks(peer: Peer):
    texts = prompts(COUNTS)
    session = Session.make(peer.decoder(), len(texts))
    session.logits([text[:3] for text in texts])
    session.logits([text[3 : len(text) // 2 + 2] for text in texts])
    got = session.logits([text[len(text) // 2 + 2 :] for text in texts])
    torch.testing.assert_close(got, _want(peer, texts), **TIGHT)


def test_a_cached_prefix_is_read_and_not_written(peer: Peer):
    """A second request's table begins with the pages of the first."""
    first, second = prompts((64, 23))
    session = Session.make(peer.decoder(), 2)
    session.logits([first, []])
    shared = 48
    pages = shared // 16
    session.page_table[1, :pages] = session.page_table[0, :pages]
    session.lengths[1] = shared
    kept = [k[session.page_table[0, :pages].long()].clone() for k, _ in session.caches]
    got = session.logits([[first[0]], second])
    want = _want(peer, [[*first, first[0]], first[:shared] + second])
    torch.testing.assert_close(got, want, **TIGHT)
    for (k, _), old in zip(session.caches, kept, strict=True):
        assert torch.equal(k[session.page_table[0, :pages].long()], old)


def test_decode_greedily(peer: Peer):
    texts, steps = prompts(COUNTS), 12
    session = Session.make(peer.decoder(), len(texts))
    found = [session.logits(texts)]
    for _ in range(steps):
        tokens = found[-1].argmax(-1).tolist()
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        found.append(session.logits([[token] for token in tokens], ragged=False))
    want = torch.stack([peer.logits(text, steps + 1) for text in texts], 1)
    torch.testing.assert_close(torch.stack(found), want, **TIGHT)


def test_bf16_errs_no_more_than_transformers(peer: Peer):
    """Both against the fp32 run; many rows, as the error of one is a matter of chance."""
    texts = prompts(range(2, 96, 6))
    want = _want(peer, texts)
    theirs = peer.last_logits(texts, torch.bfloat16)
    for chunk in (100, 16):
        session = Session.make(peer.decoder(torch.bfloat16), len(texts), 112)
        got = torch.empty_like(want)
        for at in range(0, 92, chunk):
            chunks = [text[at : at + chunk] for text in texts]
            logits = session.logits(chunks)
            for request, tokens in enumerate(chunks):
                if tokens:
                    got[request] = logits[request]
        assert error(got, want, peer.family) <= 1.2 * error(theirs, want, peer.family), chunk


def test_a_layer_can_be_launched_alone(peer: Peer):
    texts = prompts(COUNTS)
    decoder = peer.decoder()
    want = Session.make(decoder, len(texts)).logits(texts)
    step = Session.make(decoder, len(texts)).step(texts).planned()
    decoder.embed(step)
    for index in range(decoder.config.num_layers):
        assert decoder.layer(index, step) is step.buffers.hidden
    assert torch.equal(decoder.head(step), want)
