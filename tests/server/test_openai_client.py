"""OpenAI's client against a tiny model on CPU tensors: what it gets is what the runtime draws."""

from __future__ import annotations

from collections.abc import Iterator
from runpy import run_path
from typing import Any

import openai
import pytest

from smkern.examples import openai_client
from smkern.models import SamplingParams
from smkern.runtime.multiplexer import Multiplexer
from tests.models.generation import Letters
from tests.server.serving import NAME, Chatting, Running, running, with_tensors

pytestmark = pytest.mark.slow

PROMPT = "hello"
IDS = Letters().encode(PROMPT)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(with_tensors, tokenizer=Chatting()) as found:
        yield found


def drawn(prompt: list[int], count: int, **options: Any) -> tuple[int, ...]:
    """What a runtime in this process draws."""
    mux = with_tensors()
    handle = mux.submit(prompt, SamplingParams(max_new_tokens=count, **options))
    list(mux.run())
    mux.close()
    return handle.tokens


def text_of(tokens: tuple[int, ...]) -> str:
    return Letters().decode(list(tokens), skip_special_tokens=True)


GREEDY = drawn(IDS, 40)
TEXT = text_of(GREEDY)
assert len(TEXT) > 8, "the tests need letters"


def complete(server: Running, **options: Any) -> Any:
    given: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    return server.client.completions.create(**given | options)


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
def test_a_completion_is_what_the_runtime_draws(server: Running, prompt: Any) -> None:
    made = complete(server, prompt=prompt, extra_body={"return_token_ids": True})
    (choice,) = made.choices
    assert tuple(choice.token_ids) == GREEDY
    assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "length", 0)
    assert made.object == "text_completion"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 40)
    assert made.usage.total_tokens == 45


def test_a_stream_says_the_same_token_by_token(server: Running) -> None:
    stream = complete(
        server, stream=True, stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    *parts, last = list(stream)
    assert "".join(part.choices[0].text for part in parts) == TEXT
    assert tuple(t for part in parts for t in part.choices[0].token_ids) == GREEDY
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 40)
    assert len({part.id for part in (*parts, last)}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [TEXT[4:7], [TEXT[5:7], "never there"]])
def test_a_stop_text_is_cut_off_and_ends_the_engines_work(server, stop, stream) -> None:
    wanted = TEXT[: min(TEXT.find(one) for one in ([stop] if isinstance(stop, str) else stop[:1]))]
    found = complete(server, stop=stop, stream=stream, max_tokens=200)
    if stream:
        parts = list(found)
        text = "".join(part.choices[0].text for part in parts)
        assert parts[-1].choices[0].finish_reason == "stop"
    else:
        (choice,) = found.choices
        text = choice.text
        assert choice.finish_reason == "stop"
        assert found.usage.completion_tokens < 40
    assert text == wanted
    server.settle()


def test_a_stop_token_ends_without_text(server: Running) -> None:
    at = next(at for at, token in enumerate(GREEDY) if at > 2 and token < 26)
    at = GREEDY.index(GREEDY[at])
    made = complete(server, extra_body={"stop_token_ids": [GREEDY[at]]})
    assert made.choices[0].text == text_of(GREEDY[:at])
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.completion_tokens == at + 1


def test_choices_have_seeds_of_their_own(server: Running) -> None:
    options = {"temperature": 0.9, "top_p": 0.8}
    made = complete(
        server, prompt=[PROMPT, "world"], n=2, seed=7, max_tokens=12,
        extra_body={"return_token_ids": True, "top_k": 20}, **options,
    )  # fmt: skip
    asked = [(word, seed) for word in (PROMPT, "world") for seed in (7, 8)]
    for choice, (word, seed) in zip(made.choices, asked, strict=True):
        ids = Letters().encode(word)
        assert tuple(choice.token_ids) == drawn(ids, 12, seed=seed, top_k=20, **options)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (10, 48)


def test_streamed_choices_are_kept_apart(server: Running) -> None:
    stream = complete(
        server, n=3, seed=1, max_tokens=15, temperature=1.0, stream=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for part in stream:
        found[part.choices[0].index] += part.choices[0].token_ids
    for at, tokens in found.items():
        assert tuple(tokens) == drawn(IDS, 15, temperature=1.0, seed=1 + at)


def test_both_paths_take_both_names_of_a_limit(server: Running) -> None:
    made = complete(server, max_tokens=None, extra_body={"max_completion_tokens": 3})
    assert made.usage.completion_tokens == 3


def test_priority_and_deadline_reach_the_runtime(server: Running, monkeypatch) -> None:
    """A lower priority is served first, as in vLLM; in the runtime a higher one is."""
    seen: list[dict[str, Any]] = []
    submit = Multiplexer.submit

    def noting(mux: Multiplexer, prompt: Any, params: Any, **how: Any) -> Any:
        seen.append(how)
        return submit(mux, prompt, params, **how)

    monkeypatch.setattr(Multiplexer, "submit", noting)
    complete(server, n=2, max_tokens=1, extra_body={"priority": 3, "deadline_ms": 250})
    complete(server, max_tokens=1)
    asked = {"priority": -3, "deadline_ms": 250.0}
    assert seen == [asked, asked, {"priority": 0, "deadline_ms": None}]


@pytest.mark.parametrize("content", ["hell", [{"type": "text", "text": "he"},
                                             {"type": "text", "text": "ll"}]])  # fmt: skip
def test_a_chat_goes_through_the_template(server: Running, content: Any) -> None:
    asked: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": content}], "temperature": 0,
    }  # fmt: skip
    wanted = text_of(drawn(Letters().encode("hellz"), 20))
    made = server.client.chat.completions.create(**asked, max_completion_tokens=20)
    assert made.object == "chat.completion"
    assert (made.choices[0].message.role, made.choices[0].message.content) == ("assistant", wanted)
    first, *parts = server.client.chat.completions.create(**asked, max_tokens=20, stream=True)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content for part in parts) == wanted
    assert parts[-1].choices[0].finish_reason == "length"


def test_a_chat_has_variables_of_its_template(server: Running) -> None:
    made = server.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hell"}], temperature=0, max_tokens=20,
        extra_body={"chat_template_kwargs": {"ending": "y"}},
    )  # fmt: skip
    assert made.choices[0].message.content == text_of(drawn(Letters().encode("helly"), 20))


def test_a_chat_goes_on_to_the_end_of_the_context_unless_told(server: Running) -> None:
    messages: Any = [{"role": "user", "content": "hell"}]
    made = server.client.chat.completions.create(model=NAME, messages=messages, temperature=0)
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert made.usage.total_tokens == 257  # the last token's keys are never needed


def test_a_prompt_that_came_before_is_found(server: Running) -> None:
    ids = [3] * 64
    complete(server, prompt=ids, max_tokens=1)
    again = complete(server, prompt=ids, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == 48  # all full pages but the last


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told_of_a_choice_that_a_stop_text_ends(server, stream: bool) -> None:
    ids = Letters().encode("cachedbefore" * 4)
    text = text_of(drawn(ids, 12))
    complete(server, prompt=ids, max_tokens=1)
    how: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    again = complete(server, prompt=ids, stop=text[1:3], stream=stream, **how)
    made = [*again][-1] if stream else again
    assert made.usage.completion_tokens < 40
    assert made.usage.prompt_tokens_details.cached_tokens == 32


def test_cached_tokens_of_a_prompt_are_counted_once(server: Running) -> None:
    prompts = [[4] * 64, [5] * 64]
    fresh = complete(server, prompt=prompts, n=8, max_tokens=2)
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    again = complete(server, prompt=[*prompts, [6] * 64], n=2, max_tokens=2)
    assert again.usage.prompt_tokens_details.cached_tokens == 96


def test_models(server: Running) -> None:
    (model,) = server.client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == (NAME, "smkern", 256)  # type: ignore[attr-defined]
    assert server.client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        server.client.models.retrieve("other")


def test_the_example_prints_what_comes(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    text = openai_client.show(PROMPT, f"{server.url}/v1", max_tokens=12)
    assert capsys.readouterr().out == f"{text}\n5 + 12 tokens\n"


def test_the_example_says_what_a_server_without_a_tokenizer_answers(monkeypatch) -> None:
    with running(with_tensors) as bare:
        monkeypatch.setattr("sys.argv", ["openai_client.py", PROMPT, f"{bare.url}/v1"])
        with pytest.raises(SystemExit, match="this server has no tokenizer: pass token ids"):
            run_path(openai_client.__file__, run_name="__main__")
