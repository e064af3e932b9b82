"""Tokenizers of a folder; text as tokens come: characters of several tokens, stop texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from smkern.errors import ConfigError
from smkern.models.tokenizer import Detokenizer, load_tokenizer
from tests.models.generation import Letters


def ids_of(text: str) -> list[int]:
    return Letters().encode(text)


def pushed(ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    stream = Detokenizer(Letters(), [1, 2, 3], stops)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream


@pytest.mark.parametrize("config", ["[]", '{"tokenizer_class": 5}', "{"])
def test_a_tokenizer_that_is_none_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match="holds no tokenizer that transformers reads"):
        load_tokenizer(tmp_path)


def test_text_comes_token_by_token() -> None:
    pieces, stream = pushed(ids_of("abc"))
    assert pieces == ["a", "b", "c", ""]
    assert stream.text == "abc"


def test_half_a_character_is_held_back() -> None:
    assert pushed([0, 40, 41, 1])[0] == ["a", "", "é", "b", ""]
    assert pushed([0, 40])[0] == ["a", "", "�"]


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("abcd", ("bc",), ["a", "", "", ""]),
        ("abxd", ("bc",), ["a", "", "bx", "d", ""]),
        ("abab", ("abc",), ["", "", "ab", "", "ab"]),
        ("xabb", ("b", "ab"), ["x", "", "", ""]),
        ("aab", ("ab",), ["", "a", "", ""]),
    ],
)
def test_stop_texts_are_cut_off_and_their_beginnings_held(
    text: str, stops: tuple[str, ...], pieces: list[str]
) -> None:
    got, stream = pushed(ids_of(text), stops)
    assert got == pieces
    assert stream.text == "".join(pieces)


def test_a_beginning_that_is_no_stop_is_given_out() -> None:
    got, stream = pushed(ids_of("aaab"), ("aac",))
    assert "".join(got) == "aaab"
    assert not stream.stopped
