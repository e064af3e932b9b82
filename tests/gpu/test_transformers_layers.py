"""A transformers model as embed, layer(i) and head on a GPU: graphs, partitions, two lanes."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

import smkern
import smkern.integrations.transformers as st
from smkern.models.layered import forward
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver
from tests.gpu.models.support import MOST, check_decoded, decode_graph, gpu_peer
from tests.integrations.serving import NEW, Serving
from tests.models.peers import Peer, error, prompts
from tests.models.session import Session

COUNTS = (33, 100, 250, 300)
STEPS = 12


WIDER = 1.5
"""Two ways to round differ by a fifth here (1.21 times was seen); a wrong layer by far more."""


class Pair:
    """transformers' model, and a bf16 copy of it whose products and attention are ours."""

    def __init__(self, family: str) -> None:
        self.peer: Peer = gpu_peer(family, "small")
        model = deepcopy(self.peer.model).to(torch.bfloat16)
        # the frequencies stay in fp32, as they are where a model is loaded
        model.model.rotary_emb = deepcopy(self.peer.model.model.rotary_emb)
        st.swap_linear(model)
        self.decoder = st.Layers(model)

    def session(self, batch: int) -> Session:
        return Session.make(self.decoder, batch, MOST)  # type: ignore[arg-type]

    def check(self, got: torch.Tensor, texts: list[list[int]]) -> None:
        """Our distance from transformers in fp32 is at most 1.5 times transformers' in bf16."""
        want, theirs = (self.peer.last_logits(texts, x) for x in (torch.float32, torch.bfloat16))
        ours, bound = (error(x, want, self.peer.family) for x in (got.float(), theirs))
        assert ours <= WIDER * bound, f"{ours:.2e}, transformers' {bound:.2e}"


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    del made
    torch.cuda.empty_cache()


def begin(pair: Pair, texts: list[list[int]]) -> tuple[Session, torch.Tensor]:
    session = pair.session(len(texts))
    return session, forward(pair.decoder, session.step(texts)).argmax(-1)


def test_prompts_and_chunks(pair):
    texts = prompts(COUNTS)
    session = pair.session(len(texts))
    forward(pair.decoder, session.step([text[:20] for text in texts]))
    pair.check(forward(pair.decoder, session.step([text[20:] for text in texts])), texts)


@pytest.mark.parametrize("num_sms", [None, 16, 40])
def test_graphs_of_decode_steps(pair, ladder, num_sms):
    partition = None if num_sms is None else ladder.split(decode=num_sms).decode
    texts = prompts(COUNTS)
    session, first = begin(pair, texts)
    graph = decode_graph(session, first, partition=partition)
    tokens, logits = torch.empty(STEPS, len(texts), dtype=torch.int32, device="cuda"), []
    for step in range(STEPS):
        graph.replay(into=tokens[step : step + 1])
        (partition or torch.cuda).synchronize()
        logits.append(graph.logits.float().clone())
    fed = [[*text, int(token)] for text, token in zip(texts, first, strict=True)]
    check_decoded(pair, fed, tokens, torch.stack(logits))
    graph.close()


def test_a_prompts_layers_beside_decode_steps(pair, ladder):
    """The interleaver alone: a graph on 40 SMs, layers on the rest; the bits of either alone."""
    texts, (long,) = prompts(COUNTS), prompts((600,))
    session, first = begin(pair, texts)
    partition = ladder.split(decode=40).decode
    graph = decode_graph(session, first, partition=partition)
    kept = tuple(x.clone() for x in (graph.inputs.token_ids, graph.inputs.kv_lens))

    def run(lanes: Interleaver, *, beside: bool) -> Any:
        """Tokens of the steps, and the prompt's logits."""
        for held, x in zip(kept, (graph.inputs.token_ids, graph.inputs.kv_lens), strict=True):
            x.copy_(held)
        prompt = pair.session(1).step([long])
        tokens = torch.zeros(STEPS, len(texts), dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        works = [Work("embed", lambda _: pair.decoder.embed(prompt), launches=20)]
        for index in range(pair.decoder.config.num_layers):
            works.append(
                Work("layer", lambda _, i=index: pair.decoder.layer(i, prompt), launches=60)
            )
        works.append(Work("head", lambda _: pair.decoder.head(prompt), launches=20))
        lanes.aim(40)
        for step in range(STEPS):
            lanes.launch("decode", Work("decode", lambda _, i=step: replay(tokens[i])))
            if beside and works:
                lanes.launch("prefill", works.pop(0))
        lanes.drain()
        for work in works:
            lanes.launch("prefill", work)
        lanes.drain()
        lanes.device.synchronize()
        return tokens, prompt.buffers.logits.clone()

    def replay(into: torch.Tensor) -> None:
        graph._graph.replay()
        into.copy_(graph.inputs.token_ids, non_blocking=True)

    lanes = Interleaver(CudaDevice(ladder))
    together, alone = run(lanes, beside=True), run(lanes, beside=False)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])
    pair.check(together[1], [long])
    graph.close()


def test_on_the_runtimes_executor(pair, ladder):
    """Each token is the fp32 model's best behind those before it, or within rounding of it."""
    serving = Serving(pair.decoder.model, prompts((200, 30, 333)), ladder=ladder)
    serving.executor.capture(rungs=[None, 40])
    serving.lanes.aim(40)
    serving.run()
    for request in serving.requests:
        drawn = serving.drawn(request)
        assert len(drawn) == NEW
        scores = pair.peer.logits(request.ids).cpu()[request.prompt_len - 1 : -1]
        chosen = scores.gather(1, drawn[:, None])[:, 0]
        assert bool((scores.max(1).values - chosen <= 0.05 * scores.abs().max()).all())
    assert serving.executor.memory_report().graphs > 0
    serving.executor.close()


def test_a_partition_owns_nothing_of_it(pair):
    """Or a ladder could not be closed while the model lives."""
    with smkern.ladder([32]) as ladder:
        partition = ladder.split(decode=32).decode
        session = pair.session(1)
        torch.cuda.synchronize()
        with partition:
            forward(pair.decoder, session.step(prompts((50,))).planned())
        partition.synchronize()
        del session
        ladder.close()
