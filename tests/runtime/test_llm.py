"""Generation equals each prompt alone, whatever the batch, the chunks and the pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from smkern import LLM
from smkern.errors import ArgumentError, ConfigError, OutOfPagesError, PartitionError, RequestError
from smkern.models import Decoder, MoeConfig, SamplingParams, Step, Weights
from smkern.runtime import HostDevice
from tests.models.generation import (
    VOCAB,
    assert_nothing_leaked,
    failing_layers,
    greedy,
    make_llm,
    one_at_a_time,
    random_prompts,
    tiny,
)

pytestmark = pytest.mark.slow

LENGTHS = [5, 1, 40, 17, 16, 33, 2, 64, 9, 25]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return one_at_a_time(tiny(), prompts, [greedy()] * len(prompts))


def test_the_model_says_different_things(alone: list[tuple[int, ...]]) -> None:
    assert len({tokens[-4:] for tokens in alone}) > len(alone) // 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch": 3},
        {"max_step_tokens": 7},
        {"num_pages": 7},
        {"num_pages": 5, "max_step_tokens": 20},
        {"prefix_cache": False, "num_pages": 9},
        {"page_size": 1, "num_pages": 120},
    ],
    ids=str,
)
def test_batches_chunks_and_few_pages_change_nothing(options, prompts, alone) -> None:
    llm = make_llm(**options)
    done = llm.generate(prompts, greedy())
    assert [x.tokens for x in done] == alone
    assert [(x.index, x.prompt_len) for x in done] == list(enumerate(LENGTHS))
    assert {x.finish_reason for x in done} == {"length"}
    assert_nothing_leaked(llm)


@pytest.mark.parametrize("architecture", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_other_families(architecture: str) -> None:
    config = tiny(architecture)
    if config.moe is not None:
        moe = MoeConfig(num_experts=4, top_k=2, intermediate_size=32)
        config = config.replace(moe=moe, intermediate_size=0)
    prompts = random_prompts([3, 20, 9], seed=1)
    llm = make_llm(config)
    done = llm.generate(prompts, greedy(6))
    assert [x.tokens for x in done] == one_at_a_time(config, prompts, [greedy(6)] * 3)


def test_pages_run_out_while_decoding() -> None:
    """Two requests that fit when they come, but not with all that they generate."""
    prompts = random_prompts([16, 16], seed=2)
    llm = make_llm(num_pages=5)
    done = llm.generate(prompts, greedy(40))
    assert [x.tokens for x in done] == one_at_a_time(tiny(), prompts, [greedy(40)] * 2)
    assert_nothing_leaked(llm)


def test_drawn_tokens_follow_their_seed_and_not_the_batch(prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(10, temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=i % 3)
        for i in range(len(prompts))
    ]
    params[4] = greedy(10)
    wanted = one_at_a_time(tiny(), prompts, params)
    llm = make_llm(num_pages=9, max_step_tokens=30)
    assert [x.tokens for x in llm.generate(prompts, params)] == wanted
    again = llm.generate(prompts[3], SamplingParams(10, temperature=1.5, seed=77))
    other = llm.generate(prompts[3], SamplingParams(10, temperature=1.5, seed=78))
    assert again[0].tokens != other[0].tokens


def test_requests_without_a_seed_follow_the_models() -> None:
    params, prompt = SamplingParams(10, temperature=2.0), random_prompts([5])[0]
    one, two = make_llm(seed=3), make_llm(seed=3)
    first = [x.tokens for x in one.generate([prompt, prompt], params)]
    assert first[0] != first[1]
    assert [x.tokens for x in two.generate([prompt, prompt], params)] == first


def test_stop_tokens_end_a_request(prompts: list[list[int]], alone: list[tuple[int, ...]]) -> None:
    stop = alone[0][3]
    cut = alone[0].index(stop) + 1
    llm = make_llm()
    done = llm.generate(prompts[:2], [greedy(stop_token_ids=(stop,)), greedy()])
    assert done[0].tokens == alone[0][:cut]
    assert done[0].finish_reason == "stop"
    assert done[1].tokens == alone[1]
    eos = make_llm(tiny(eos_token_ids=(stop,)))
    assert eos.generate(prompts[0], greedy())[0].tokens == alone[0][:cut]
    assert eos.generate(prompts[0], greedy(ignore_eos=True))[0].tokens == alone[0]


def test_a_known_prefix_is_not_computed_again_and_gives_the_same_tokens() -> None:
    shared = random_prompts([50], seed=5)[0]
    prompts = [shared + tail for tail in random_prompts([3, 14, 30], seed=6)]
    wanted = one_at_a_time(tiny(), prompts, [greedy()] * 3)
    llm = make_llm()
    first = llm.generate(prompts[0], greedy())[0]
    rest = llm.generate(prompts, greedy())
    assert first.cached_tokens == 0
    assert [x.cached_tokens for x in rest] == [48, 48, 48]
    assert [first.tokens, *[x.tokens for x in rest]] == [wanted[0], *wanted]
    answer = [*prompts[0], *first.tokens, 1, 2]
    follow = llm.generate([answer], greedy())[0]
    assert follow.cached_tokens == 64
    assert [follow.tokens] == one_at_a_time(tiny(), [answer], [greedy()])


def test_the_context_ends_a_request() -> None:
    config = tiny(max_position=32)
    llm = make_llm(config)
    prompt = random_prompts([30])[0]
    done = llm.generate([prompt, prompt[:20] + prompt[:12]], greedy(100))
    assert [len(x.tokens) for x in done] == [3, 1]
    assert [x.finish_reason for x in done] == ["length", "length"]
    short = make_llm(config, max_context=30)
    assert len(short.generate(prompt, greedy(100))[0].tokens) == 1
    with pytest.raises(RequestError, match=r"prompt 0 has 30 tokens, the context holds 29"):
        make_llm(config, max_context=29).generate(prompt)


def test_a_stream_is_what_generate_gives(prompts, alone) -> None:
    llm = make_llm(num_pages=9)
    tokens: dict[int, list[int]] = {}
    completions = {}
    for output in llm.stream(prompts, greedy()):
        assert output.id not in completions
        assert output.token is not None
        assert output.text is None
        tokens.setdefault(output.id, []).append(output.token)
        if output.completion is not None:
            completions[output.id] = output.completion
    assert [tuple(tokens[i]) for i in range(len(prompts))] == alone
    assert [completions[i].tokens for i in range(len(prompts))] == alone
    assert_nothing_leaked(llm)


def test_a_stream_that_is_left_gives_its_pages_back(prompts, alone) -> None:
    llm = make_llm(num_pages=12)
    stream = llm.stream(prompts, greedy())
    for _ in range(9):
        next(stream)
    with pytest.raises(ArgumentError, match="exhaust or close its iterator"):
        llm.generate(prompts)
    assert llm.pool.usage.held > 0
    assert isinstance(stream, Iterator)
    stream.close()  # type: ignore[attr-defined]
    assert_nothing_leaked(llm)
    assert [x.tokens for x in llm.generate(prompts, greedy())] == alone


@pytest.mark.parametrize("after", [0, 5, 40])
@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt("planted")], ids=repr)
def test_what_raises_in_a_forward_leaks_nothing(error, after, prompts, alone, monkeypatch) -> None:
    """An error stays; Ctrl-C comes once, in the middle of a forward or between two."""
    stays = isinstance(error, RuntimeError)
    llm = make_llm(num_pages=9)
    with (
        failing_layers(monkeypatch, error, lambda n: n >= after if stays else n == after),
        pytest.raises(type(error), match="planted"),
    ):
        llm.generate(prompts, greedy())
    assert_nothing_leaked(llm)
    assert [x.tokens for x in llm.generate(prompts, greedy())] == alone


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt 1 is empty"),
        ([1, VOCAB], {}, f"prompt 1 has {VOCAB} at position 1: .* 0 to {VOCAB - 1}"),
        ([1, -1], {}, "prompt 1 has -1 at position 1"),
        ([1.5], {}, "prompt 1 has 1.5"),
        ([1, 10**30], {}, "prompt 1 has 1000.* at position 1"),
        ([1, "2"], {}, "prompt 1 has '2' at position 1"),
        ([np.int64(1), VOCAB], {}, f"prompt 1 has {VOCAB} at position 1"),
        ([np.int64(1), 1.5], {}, "prompt 1 has 1.5 at position 1"),
        ([1, torch.empty((), dtype=torch.int64, device="meta")], {}, "prompt 1 has .* position 1"),
        (1.5, {}, "prompt 1 is 1.5: pass a text or a list of token ids"),
        (None, {}, "prompt 1 is None"),
        ([1] * 257, {}, "prompt 1 has 257 tokens, the context holds 256"),
        ("text", {}, "prompt 1 is a text, and there is no tokenizer"),
        ([1], {"stop": "x"}, "prompt 1 stops at .*, and there is no tokenizer"),
        ([1], {"stop": ("",)}, "prompt 1: stop="),
        ([1], {"stop": None}, "prompt 1: stop=None: pass a text"),
        ([1], {"stop_token_ids": 2}, "prompt 1: stop_token_ids=2: pass a tuple of token ids"),
        ([1], {"stop_token_ids": None}, "prompt 1: stop_token_ids=None"),
        ([1], {"temperature": 10**400}, "prompt 1: temperature=1000"),
        ([1], {"temperature": 1e39}, "temperature=1e.39: pass a finite number .* 3.40282e.38"),
        ([1], {"temperature": -0.1}, "prompt 1: temperature=-0.1: pass a finite number"),
        ([1], {"temperature": float("nan")}, "prompt 1: temperature=nan"),
        ([1], {"top_p": 0.0}, "prompt 1: top_p=0.0: pass a number above 0"),
        ([1], {"top_p": 1.01}, "prompt 1: top_p=1.01"),
        ([1], {"min_p": -0.5}, "prompt 1: min_p=-0.5"),
        ([1], {"top_k": -1}, "prompt 1: top_k=-1"),
        ([1], {"top_k": 1.5}, "prompt 1: top_k=1.5"),
        ([1], {"seed": -1}, "prompt 1: seed=-1"),
        ([1], {"max_new_tokens": 0}, "prompt 1: max_new_tokens=0"),
        ([1], {"stop_token_ids": (VOCAB,)}, "prompt 1: stop_token_ids"),
        ([1], {"stop": ("x",) * 65}, "prompt 1: stop has 65 texts: pass 64 at most"),
    ],
)
def test_bad_requests_are_named_and_nothing_runs(prompt, params, message) -> None:
    llm = make_llm()
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=message):
            call([[1, 2], prompt], [greedy(), SamplingParams(**params)])
    assert llm.pool.usage == (0, 0, 64)


def test_ids_of_numpy_are_whole_numbers_too() -> None:
    llm = make_llm()
    of_numpy, plain = llm.generate([[*np.array([3, 4])], [3, 4]], greedy())
    assert of_numpy.tokens == plain.tokens
    assert {type(token) for token in of_numpy.tokens} == {int}


def test_what_can_never_fit_is_refused_by_name() -> None:
    llm = make_llm(num_pages=4)
    with pytest.raises(OutOfPagesError, match="prompt 1 may take 65 tokens in 5 pages, the pool"):
        llm.generate([[1], [1] * 50], greedy(16))
    assert len(llm.generate([[1] * 50], greedy(15))[0].tokens) == 15
    assert_nothing_leaked(llm)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, torch.tensor([1, 2])])
def test_what_is_no_list_of_prompts_is_named(prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"prompts are a {type(prompts).__name__}: pass"):
        make_llm().generate(prompts)


@pytest.mark.parametrize("params", [5, {"temperature": 1.0}, [{"temperature": 1.0}]])
def test_params_of_another_kind_are_named(params: Any) -> None:
    with pytest.raises(RequestError, match="pass SamplingParams, one for all or one each"):
        make_llm().generate([[1]], params)


def test_a_device_that_closes_under_a_run_leaks_nothing(prompts, monkeypatch) -> None:
    """As a partition does: the next launch raises, and so does the run."""
    llm = make_llm()
    stream = llm.stream(prompts, greedy())
    next(stream)

    def closed(*given: Any) -> None:
        raise PartitionError("closed")

    with monkeypatch.context() as patched:
        patched.setattr(HostDevice, "launch", closed)
        with pytest.raises(PartitionError, match="closed"):
            list(stream)
    assert_nothing_leaked(llm)
    assert len(llm.generate(prompts, greedy())) == len(prompts)


def test_a_stream_that_is_never_asked_runs_nothing(prompts: list[list[int]]) -> None:
    llm = make_llm()
    llm.stream(prompts, greedy())
    assert [x.index for x in llm.generate(prompts[:2], greedy(3))] == [0, 1]
    assert_nothing_leaked(llm)


def test_pages_of_somebody_else_are_an_error() -> None:
    llm = make_llm(num_pages=3)
    llm.pool.allocate("foreign", [1] * 33)
    with pytest.raises(OutOfPagesError, match="prompt 0 needs 1 pages"):
        llm.generate([1, 2], greedy(2))
    assert llm.pool.requests == ("foreign",)
    llm.pool.release("foreign")
    assert len(llm.generate([1, 2], greedy(2))[0].tokens) == 2


def test_a_partition_is_for_a_gpu() -> None:
    with pytest.raises(ArgumentError, match="for weights on cpu: partitions are a GPU's"):
        make_llm(partition=object())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_tokens", r"\(max_tokens=2\): it is called max_new_tokens here"),
        ("presence_penalty", r"\(presence_penalty=2\): it is not served: .* max_new_tokens, temp"),
    ],
)
def test_sampling_names_of_other_libraries(name: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**{name: 2})


def test_counts_of_params_and_of_prompts_agree() -> None:
    llm = make_llm()
    with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
        llm.generate([[1], [2]], [greedy()])
    assert llm.generate([]) == []


def test_a_model_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="'qwen9' is neither a folder nor a preset: there is"):
        LLM("qwen9")
    with pytest.raises(ArgumentError, match="max_context=500"):
        make_llm(max_context=500)


@pytest.mark.parametrize("page_size", [0, None, "16", 48])
def test_a_page_size_that_is_none_is_named(page_size: Any) -> None:
    with pytest.raises(ArgumentError, match=f"page_size='?{page_size}"):
        make_llm(page_size=page_size, num_pages=None)


def test_weights_of_ones_own() -> None:
    config, prompt = tiny(), random_prompts([9])
    weights = Weights.random(config, 11)
    by_weights = LLM(config, weights=weights, num_pages=8).generate(prompt, greedy())
    by_seed = LLM(config, seed=11, device="cpu", num_pages=8).generate(prompt, greedy())
    assert by_weights[0].tokens == by_seed[0].tokens
    assert make_llm(config).generate(prompt, greedy())[0].tokens != by_seed[0].tokens


def test_a_forward_takes_all_that_decode_and_prompts_up_to_its_size(monkeypatch) -> None:
    """Tokens of each request, by forward; of a decode step, how many decode."""
    seen: list[list[int] | int] = []
    embed = Decoder.embed

    def spy(self: Decoder, step: Step) -> torch.Tensor:
        ends = step.cu_q_lens
        seen.append(step.batch if ends is None else ends.diff().tolist())
        return embed(self, step)

    monkeypatch.setattr(Decoder, "embed", spy)
    make_llm(max_step_tokens=20).generate(random_prompts([12, 30, 1]), greedy(3))
    assert seen == [[12, 8], [20, 1], [2, 1, 1], 2, 2]
