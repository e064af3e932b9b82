"""Prompts to ids and tokens to text, with a tokenizer of transformers and one by hand."""

from __future__ import annotations

import pytest
import tokenizers
import transformers

from smkern.models import SamplingParams
from smkern.models.tokenizer import Tokenizer, load_tokenizer
from smkern.server.errors import ApiError
from smkern.server.messages import End, Ready
from smkern.server.protocol import ChatRequest, CompletionRequest
from smkern.server.text import Choice, encode, encode_chat
from tests.models.generation import Letters

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if mood is defined %}{% if mood == 'bad' %}{{ raise_exception('bad mood') }}{% endif %}"
    "<{{ mood }}>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE of a folder, with a chat template; it puts <s> in front of texts."""
    made = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    made.train_from_iterator(["the cat sat on the mat"] * 4, 300, special_tokens=["<s>"])
    made._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made._tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


def test_a_text_gets_what_its_tokenizer_puts_in_front(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "the cat")
    assert ids[0] == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"


def test_a_conversation_is_its_templates_text_and_nothing_more(tokenizer: Tokenizer) -> None:
    ids = encode_chat(tokenizer, [{"role": "user", "content": "sat"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<user>sat<assistant>"
    with pytest.raises(ApiError, match="the chat template refused the messages: no tools"):
        encode_chat(tokenizer, [{"role": "tool", "content": "sat"}])


def test_a_template_has_variables_of_the_request_and_none_of_the_servers(
    tokenizer: Tokenizer,
) -> None:
    messages = [{"role": "user", "content": "sat"}]
    ids = encode_chat(tokenizer, messages, {"mood": "good", "other": 1})
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<user>sat<assistant><good>"
    with pytest.raises(ApiError, match="the chat template refused the messages: bad mood"):
        encode_chat(tokenizer, messages, {"mood": "bad"})
    for name in ("chat_template", "conversation", "tokenize", "add_generation_prompt", "tools"):
        with pytest.raises(ApiError, match=f"has '{name}', which the server sets itself") as caught:
            encode_chat(tokenizer, messages, {"mood": "good", name: "x"})
        assert caught.value.param == "chat_template_kwargs"
    for name in ("conversations", "messages", "self"):
        with pytest.raises(ApiError, match="the chat template refused"):
            encode_chat(tokenizer, messages, {name: "x"})


def test_a_tokenizer_without_a_template_says_what_to_use() -> None:
    with pytest.raises(ApiError, match="no chat template: use /v1/completions"):
        encode_chat(Letters(), [{"role": "user", "content": "a"}])


def test_text_comes_as_it_becomes_certain_characters_whole(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "the mät 猫!")[1:]
    choice = Choice(tokenizer, [0], SamplingParams())
    parts = [choice.take(ids[0], None, 3)]
    parts += [choice.take(token, None) for token in ids[1:-1]]
    parts.append(choice.take(ids[-1], End("length")))
    assert "".join(parts) == choice.text == "the mät 猫!"
    assert all("�" not in part for part in parts)
    assert (choice.finish_reason, choice.cached_tokens) == ("length", 3)


@pytest.mark.parametrize(
    ("stop", "end", "text", "reason"),
    [
        ((), "length", "hello", "length"),
        ((), "stop", "hell", "stop"),  # the last token ended it, and has no text
        (("ll",), None, "he", "stop"),
        (("lo",), "length", "hel", "stop"),  # at the very end
        (("lox",), "length", "hello", "length"),  # held back until the end
        (("x", "el"), None, "h", "stop"),
    ],
)
def test_choices_end(stop: tuple[str, ...], end: str | None, text: str, reason: str) -> None:
    choice = Choice(Letters(), [0], SamplingParams(stop=stop))
    tokens = Letters().encode("hello")
    for at, token in enumerate(tokens):
        if choice.finish_reason is None:
            last = at == len(tokens) - 1 and end is not None
            choice.take(token, End(end) if last else None)  # type: ignore[arg-type]
    assert (choice.text, choice.finish_reason) == (text, reason)


def test_a_stop_text_in_what_comes_at_the_end_is_the_reason() -> None:
    class Torn(Letters):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "END�" if token_ids else ""

    choice = Choice(Torn(), [], SamplingParams(stop="END"))
    assert choice.take(1, End("length")) == choice.text == ""
    assert choice.finish_reason == "stop"


def test_a_chats_room_is_what_context_and_pages_leave() -> None:
    asked = ChatRequest.parse(b'{"model": "x", "messages": [{"role": "user", "content": "a"}]}')
    # the last token's keys are never needed
    assert asked.sampling(Ready(100, 64, 50), 60, 0).max_new_tokens == 5
    assert asked.sampling(Ready(64, 1000, 50), 64, 0).max_new_tokens == 1
    with pytest.raises(ApiError, match="has 65 tokens, the model's context holds 64"):
        asked.sampling(Ready(1000, 64, 50), 65, 0)


def test_a_limit_beyond_context_or_pages_is_cut_to_what_is_left() -> None:
    for limit, tokens in ((3, 3), (400, 5), (10**30, 5)):
        asked = CompletionRequest(model="x", prompt="a", max_tokens=limit)
        for ready in (Ready(100, 64, 50), Ready(64, 100, 50)):
            assert asked.sampling(ready, 60, 0).max_new_tokens == tokens


@pytest.mark.parametrize(
    ("seed", "seeds"), [(7, [7, 8]), (2**63 - 1, [2**63 - 1, 0]), (-1, [2**63 - 1, 0])]
)
def test_seeds_are_any_of_64_bits_and_begin_again(seed: int, seeds: list[int]) -> None:
    asked = CompletionRequest(model="x", prompt="a", seed=seed)
    assert [asked.sampling(Ready(100, 100, 50), 1, at).seed for at in range(2)] == seeds
