"""Generation on a GPU: tokens that an fp32 reference finds likely, seeds, prefixes, partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import smkern
from smkern import LLM, Completion
from smkern.models import Decoder, SamplingParams
from tests.gpu.models.support import assert_likely
from tests.models.generation import assert_nothing_leaked, greedy
from tests.models.peers import FAMILIES, Peer, make_peer, prompts

LENGTHS = (5, 1, 40, 17, 16, 33, 2, 64, 9, 25, 300, 130)
NEW = 24


@dataclass(slots=True)
class Model:
    """A small model, ours in bf16 beside transformers' in fp32."""

    peer: Peer
    decoder: Decoder

    def llm(self, **options: Any) -> LLM:
        given: dict[str, Any] = {"num_pages": 200, "max_batch": 16, "max_step_tokens": 256}
        return LLM(self.decoder.config, weights=self.decoder.weights, **given | options)

    def check(self, texts: list[list[int]], done: list[Completion]) -> None:
        assert_likely(self.peer, texts, [completion.tokens for completion in done])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    torch.manual_seed(13)
    peer = make_peer(request.param, device="cuda", max_position_embeddings=1024)
    yield Model(peer, peer.decoder(torch.bfloat16, "cuda"))
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return prompts(LENGTHS)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch": 3}, {"max_step_tokens": 50}, {"num_pages": 24}, {"prefix_cache": False}],
    ids=str,
)
def test_tokens_are_the_references(model, texts, options) -> None:
    llm = model.llm(**options)
    done = llm.generate(texts, greedy(NEW, ignore_eos=True))
    assert [len(x.tokens) for x in done] == [NEW] * len(texts)
    model.check(texts, done)
    assert_nothing_leaked(llm)
    llm.close()


def test_a_known_prefix_is_read_from_the_pool(model: Model, texts: list[list[int]]) -> None:
    llm = model.llm()
    shared = texts[10]
    tails = [[*shared, *tail] for tail in (texts[3], texts[5], texts[0])]
    llm.generate(shared, greedy(4, ignore_eos=True))
    done = llm.generate(tails, greedy(NEW, ignore_eos=True))
    assert [x.cached_tokens for x in done] == [len(shared) // 16 * 16] * 3
    model.check(tails, done)
    assert_nothing_leaked(llm)
    llm.close()


def test_seeds_decide_what_is_drawn(model: Model, texts: list[list[int]]) -> None:
    llm = model.llm(prefix_cache=False)

    def run(seed: int) -> list[tuple[int, ...]]:
        drawn = SamplingParams(
            NEW, temperature=1.3, top_k=50, top_p=0.95, min_p=0.001, seed=seed, ignore_eos=True
        )
        # of one length all, so that the greedy row has the same batches and the same bits
        params = [drawn, greedy(NEW, ignore_eos=True), *[drawn] * (len(texts) - 2)]
        return [x.tokens for x in llm.generate(texts, params)]

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first[1] == other[1]
    assert sum(x != y for x, y in zip(first, other, strict=True)) > len(texts) // 2
    llm.close()


def test_all_runs_in_a_partition(model: Model, texts: list[list[int]]) -> None:
    with smkern.ladder([32]) as ladder:
        partition = ladder.split(decode=32).decode
        llm = model.llm(partition=partition)
        done = llm.generate(texts, greedy(NEW, ignore_eos=True))
        model.check(texts, done)
        assert_nothing_leaked(llm)
        llm.close()
        del llm


def test_a_budget_of_few_sms(model: Model, texts: list[list[int]]) -> None:
    llm = model.llm(num_sms=16)
    model.check(texts, llm.generate(texts, greedy(NEW, ignore_eos=True)))
    llm.close()


def test_a_second_time_nothing_is_compiled_or_captured(model, texts) -> None:
    llm = model.llm(prefix_cache=False)
    llm.generate(texts, greedy(NEW, ignore_eos=True))
    before, graphs = smkern.counters(), llm.memory_report().graphs
    assert graphs > 0
    llm.generate(texts, greedy(NEW, ignore_eos=True))
    assert smkern.counters() == before
    assert llm.memory_report().graphs == graphs
    llm.close()


def test_a_stream_that_is_left_leaves_the_model_usable(model, texts) -> None:
    llm = model.llm(num_pages=60)
    stream = llm.stream(texts, greedy(NEW, ignore_eos=True))
    for _ in range(30):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.pool.requests == ()
    done = llm.generate(texts, greedy(NEW, ignore_eos=True))
    model.check(texts, done)
    assert_nothing_leaked(llm)
    llm.close()


def test_a_preset_talks_from_a_pool_of_free_memory() -> None:
    from smkern.models import preset

    config = preset("qwen3-8b").replace(num_layers=2, vocab_size=2048, max_position=4096)
    llm = LLM(config, memory_fraction=0.2, max_step_tokens=2048)
    free, _ = torch.cuda.mem_get_info()
    assert llm.pool.num_pages * llm.pool.sizes.page_bytes > free // 10
    done = llm.generate(prompts((3000, 700), 2048), greedy(8, ignore_eos=True))
    assert [len(x.tokens) for x in done] == [8, 8]
    assert_nothing_leaked(llm)
    llm.close()
    del llm
    torch.cuda.empty_cache()
