"""Text in and out, and what a model's folder brings: weights, end tokens, a tokenizer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smkern import LLM
from smkern.errors import ConfigError, RequestError
from smkern.models import ModelConfig, Weights
from tests.models.conftest import family, folder, peer
from tests.models.generation import Letters, Raising, greedy, make_llm
from tests.models.peers import FAMILIES, Peer, hf_config, make_peer

__all__ = ["family", "folder", "peer"]

pytestmark = pytest.mark.slow


@pytest.fixture
def peer_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3").to_dict()))
    return tmp_path


def ids_of(text: str) -> list[int]:
    return Letters().encode(text)


@pytest.mark.parametrize("ends", [{}, "x", [[1]], 1.5, True])
def test_end_tokens_that_are_none_are_named(peer_folder: Path, ends: object) -> None:
    (peer_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ConfigError, match=r"eos_token_id in .*generation_config\.json="):
        LLM(peer_folder, device="cpu")


def test_prompts_are_texts_and_so_are_completions() -> None:
    llm = make_llm(tokenizer=Letters())
    by_text, by_ids = llm.generate(["hello", ids_of("hello")], greedy(24))
    assert by_text.tokens == by_ids.tokens
    assert by_text.prompt_len == 5
    assert by_text.text == Letters().decode(list(by_text.tokens), skip_special_tokens=True)
    outputs = list(llm.stream("hello", greedy(24)))
    assert "".join(output.text or "" for output in outputs) == by_text.text


def test_a_stop_text_ends_a_request() -> None:
    llm = make_llm(tokenizer=Letters())
    whole = llm.generate("hello", greedy(40))[0]
    assert whole.text
    stop = whole.text[4:6]
    done = llm.generate("hello", greedy(40, stop=stop))[0]
    assert done.text == whole.text[: whole.text.index(stop)]
    assert done.finish_reason == "stop"
    assert done.tokens == whole.tokens[: len(done.tokens)]


def test_an_ending_token_is_not_in_the_text() -> None:
    llm = make_llm(tokenizer=Letters())
    whole = llm.generate("hello", greedy(40))[0]
    last = next(token for token in whole.tokens if token < 26)
    done = llm.generate("hello", greedy(40, stop_token_ids=(last,)))[0]
    assert done.tokens[-1] == last
    assert chr(ord("a") + last) not in (done.text or "")


def test_a_tokenizer_that_raises_ends_its_own_request_alone() -> None:
    prompts = [ids_of("hello"), ids_of("world"), ids_of("again")]
    whole = make_llm().generate(prompts, greedy(12))
    others = {token for x in (*whole[:1], *whole[2:]) for token in (*prompts[x.index], *x.tokens)}
    bad = next(token for token in whole[1].tokens if token not in others)
    llm = make_llm(tokenizer=Raising(bad))
    done = llm.generate(prompts, greedy(12))
    assert [x.finish_reason for x in done] == ["length", "error", "length"]
    assert [x.tokens for x in (done[0], done[2])] == [x.tokens for x in (whole[0], whole[2])]
    at = whole[1].tokens.index(bad)
    assert done[1].tokens == whole[1].tokens[: at + 1]
    assert len(done[1].text or "") <= at
    assert isinstance(done[1].error, RequestError)
    assert "its tokenizer raised UnicodeError" in str(done[1].error)
    ends = [x for x in llm.stream(prompts, greedy(12)) if x.completion is not None]
    assert [x.error is not None for x in sorted(ends, key=lambda x: x.id)] == [False, True, False]
    assert llm.pool.usage.held == 0


def test_a_prompt_that_a_tokenizer_answers_in_vain_is_named() -> None:
    for answer in (None, 7, ["a"], [-1]):
        tokenizer = Letters()
        tokenizer.encode = lambda text: answer  # type: ignore  # noqa: B023
        with pytest.raises(RequestError, match="prompt 0"):
            make_llm(tokenizer=tokenizer).generate("hello", greedy(2))


def _save_tokenizer(folder: Path, vocab_size: int, **tokens: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"w{i}": i for i in range(vocab_size)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **tokens).save_pretrained(folder)


@pytest.mark.parametrize("family", [x for x in FAMILIES if x != "qwen2"], indirect=True)
def test_a_folder_brings_weights_and_tokenizer(peer: Peer, folder: Path) -> None:
    _save_tokenizer(folder, peer.model.config.vocab_size)
    llm = LLM(folder, device="cpu", num_pages=16)
    by_text, by_ids = llm.generate(["w5 w6 w7", [5, 6, 7]], greedy(6, ignore_eos=True))
    assert by_text.tokens == by_ids.tokens
    # it continues the prompt, so a space leads
    assert by_text.text == "".join(f" w{token}" for token in by_text.tokens)


def test_the_end_that_a_tokenizer_alone_names_ends_a_text(peer_folder: Path) -> None:
    """As of fine-tunes in ChatML, whose config.json was left as it was."""
    config = ModelConfig.from_hf(peer_folder)
    weights = Weights.random(config.replace(initializer_range=0.2), 3)
    _save_tokenizer(peer_folder, config.vocab_size)

    def generated(**how: bool) -> tuple[int, ...]:
        llm = LLM(peer_folder, weights=weights, device="cpu", num_pages=16)
        return tuple(llm.generate("w5 w6 w7", greedy(12, **how))[0].tokens)

    weights = replace(weights, config=config)
    whole = generated()
    assert len(whole) == 12
    end = whole[4]
    _save_tokenizer(peer_folder, config.vocab_size, eos_token=f"w{end}")
    assert generated() == whole[: whole.index(end) + 1]
    assert generated(ignore_eos=True) == whole


def test_a_qwen2_brings_a_tokenizer_of_its_own_class(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_peer("qwen2").model.save_pretrained(tmp_path)
    words = {text: index for index, text in enumerate(["<|endoftext|>", "a", "b", "c"])}
    transformers.Qwen2Tokenizer(vocab=words, merges=[]).save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu", num_pages=16)
    by_text, by_ids = llm.generate(["cab", [3, 1, 2]], greedy(6, ignore_eos=True))
    assert by_text.tokens == by_ids.tokens


def test_greedy_tokens_are_those_of_transformers(peer: Peer, folder: Path) -> None:
    prompt = [5, 77, 31, 120, 9, 5, 60]
    theirs = peer.model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    ours = LLM(folder, device="cpu", num_pages=16).generate([prompt], greedy(12, ignore_eos=True))
    assert list(ours[0].tokens) == theirs[0, len(prompt) :].tolist()


def test_without_transformers_only_text_needs_it(peer, folder, monkeypatch) -> None:
    _save_tokenizer(folder, peer.model.config.vocab_size)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("smkern.runtime.loading.find_spec", lambda name: None)
    llm = LLM(folder, device="cpu", num_pages=16)
    assert llm.generate([5, 6], greedy(2, ignore_eos=True))[0].text is None
    with pytest.raises(ConfigError, match="needs transformers, which is not installed"):
        llm.generate("w5")


def test_a_folder_without_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder, device="cpu", num_pages=16)
    with pytest.raises(RequestError, match="there is no tokenizer: pass token ids"):
        llm.generate("text")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="holds no tokenizer that transformers reads"):
        LLM(folder, device="cpu", num_pages=16, tokenizer=empty)
