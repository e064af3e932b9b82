"""Decoders on the GPU in bf16 against transformers' eager ones, both held against fp32."""

from __future__ import annotations

import torch

import smkern
from tests.gpu.models.support import TEXTS, Pair, check_decoded, decode_graph
from tests.models.peers import prompts

DECODED = 64


def test_prefill(pair: Pair):
    texts = prompts(TEXTS, pair.vocab)
    pair.assert_errs_no_more(pair.session(len(texts)).logits(texts), texts)


def test_prefill_in_chunks(pair: Pair):
    texts = prompts(TEXTS, pair.vocab)
    session = pair.session(len(texts))
    session.logits([text[: len(text) // 3] for text in texts])
    session.logits([text[len(text) // 3 : len(text) // 2] for text in texts])
    pair.assert_errs_no_more(session.logits([text[len(text) // 2 :] for text in texts]), texts)


def test_a_cached_prefix(pair: Pair):
    """All requests share the pages of the first one's beginning."""
    shared = 256
    first, *rest = prompts((shared, 1, 5, 16, 33, 70, 129, 200, 300, 301, 420, 500), pair.vocab)
    session = pair.session(len(rest))
    pages = shared // 16
    session.page_table[1:, :pages] = session.page_table[0, :pages]
    session.logits([first, *([] for _ in rest[1:])])
    session.lengths = [shared] * len(rest)
    pair.assert_errs_no_more(session.logits(rest), [first + text for text in rest])


def test_decode_greedily_by_a_graph(pair: Pair):
    texts = prompts(TEXTS, pair.vocab)
    session = pair.session(len(texts))
    first = session.logits(texts).argmax(-1)
    graph = decode_graph(session, first)
    tokens = torch.empty(DECODED, len(texts), dtype=torch.int32, device="cuda")
    logits = torch.empty(DECODED, len(texts), pair.vocab, device="cuda")
    for index in range(DECODED):
        graph.replay(into=tokens[index : index + 1])
        logits[index].copy_(graph.logits)
    graph.close()
    check_decoded(pair, [[*t, int(x)] for t, x in zip(texts, first, strict=True)], tokens, logits)


def test_in_partitions(pair: Pair):
    """Prefill on one, then decode on the other; layers are launched one by one."""
    texts = prompts(TEXTS, pair.vocab)
    session = pair.session(len(texts))
    steps = 8
    tokens = torch.empty(steps, len(texts), dtype=torch.int32, device="cuda")
    logits = torch.empty(steps, len(texts), pair.vocab, device="cuda")
    with smkern.ladder([32]) as ladder:
        split = ladder.split(decode=32)
        step = session.step(texts)
        step = step.planned(num_sms=split.prefill.num_sms)
        torch.cuda.synchronize()
        with split.prefill:
            pair.decoder.embed(step)
            for index in range(pair.decoder.config.num_layers):
                pair.decoder.layer(index, step)
            pair.decoder.head(step)
        split.prefill.synchronize()
        got = step.buffers.logits.float().clone()
        pair.assert_errs_no_more(got, texts)
        first = got.argmax(-1)
        graph = decode_graph(session, first, partition=split.decode)
        for index in range(steps):
            graph.replay(into=tokens[index : index + 1])
            split.decode.synchronize()
            logits[index].copy_(graph.logits)
        graph.close()
        del graph
    check_decoded(pair, [[*t, int(x)] for t, x in zip(texts, first, strict=True)], tokens, logits)


def test_tokens_that_do_not_fill_a_tile(pair: Pair):
    """One request, one token: the smallest step, as a prefill and as a decode."""
    text = prompts((1,), pair.vocab)
    ragged = pair.session(1).logits(text)
    plain = pair.session(1).logits(text, ragged=False)
    pair.assert_errs_no_more(ragged, text)
    pair.assert_errs_no_more(plain, text)
