"""Tokenizers of a folder; text as tokens come: characters of several tokens, stop texts."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
import transformers

from smkern.errors import ConfigError
from smkern.models.tokenizer import Detokenizer, load_tokenizer
from tests.models.generation import Letters, Torn


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


class PanicException(BaseException):
    """As pyo3 names it."""


def test_a_panic_of_the_parser_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*args: object, **options: object) -> None:
        raise PanicException("range end index out of range")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", panics)
    with pytest.raises(ConfigError, match=r"reads \(range end index"):
        load_tokenizer(tmp_path)


TOKENIZER = {"auto_map": {"AutoTokenizer": ["planted.Planted", "planted.Planted"]}}
CONFIG = {"auto_map": {"AutoConfig": "planted.Planted", **TOKENIZER["auto_map"]}}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "planted", None])
@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [(CONFIG, TOKENIZER), (CONFIG, {}), ({}, TOKENIZER), ({}, {"auto_map": ["planted.Planted"]})],
)
def test_no_code_of_a_folder_runs_and_nobody_is_asked(
    tmp_path, monkeypatch, model_type, config, tokenizer
) -> None:
    mark, asked = tmp_path / "mark", []
    monkeypatch.setattr("builtins.input", lambda *said: asked.append(said) or "yes")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "model"
    folder.mkdir()
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Planted: pass\n"
    model = {"architectures": ["LlamaForCausalLM"], "model_type": model_type, **config}
    for name, text in (("planted.py", code), ("config.json", json.dumps(model)),
                       ("tokenizer_config.json", json.dumps(tokenizer)),
                       ("tokenizer.json", "{}")):  # fmt: skip
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=r"(?s)holds no tokenizer.*pass token ids"):
        load_tokenizer(folder)
    assert not asked
    assert not mark.exists()


def test_a_pipe_in_a_folder_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"has \['tokenizer.json'\], which are no files"):
        load_tokenizer(tmp_path)


def test_whatever_loads_by_name_refuses_code_of_the_folder() -> None:
    root = Path(__file__).resolve().parents[2]
    calls = [
        (path.name, node.lineno, node.keywords)
        for room in ("smkern", "autotune", "bench", "examples")
        for path in (root / room).rglob("*.py")
        if "from_pretrained(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    ]
    assert calls
    for name, line, keywords in calls:
        told = {x.arg: ast.unparse(x.value) for x in keywords}
        assert told.get("trust_remote_code") == "False", (name, line)


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
def test_stop_texts_are_cut_off_and_their_beginnings_held(text, stops, pieces) -> None:
    got, stream = pushed(ids_of(text), stops)
    assert got == pieces
    assert stream.text == "".join(pieces)


def test_a_beginning_that_is_no_stop_is_given_out() -> None:
    got, stream = pushed(ids_of("aaab"), ("aac",))
    assert "".join(got) == "aaab"
    assert not stream.stopped


def test_a_stop_text_beside_half_a_character_is_cut_off_too() -> None:
    stream = Detokenizer(Torn(b"ab", b"END\xe2\x80"), [0], ("END",))
    assert [stream.push(0), stream.push(1), stream.finish()] == ["ab", "", ""]
    assert (stream.text, stream.stopped) == ("ab", True)


class Counting:
    """A tokenizer that notes how many tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, **options))


def of_bytes() -> Any:
    """A tokenizer of a byte a token; <s> is special."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={x: i for i, x in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def of_words() -> Any:
    """SentencePiece's way with spaces: <s> and </s> (0, 1) are special, then come words."""
    words = {"<s>": 0, "</s>": 1, "▁hello": 2, "▁world": 3, "ly": 4, "▁you": 5, "<unk>": 6, "▁": 7}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    steps = tokenizers.decoders
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.Fuse(), steps.Strip(" ", 1, 0)])
    marks = [tokenizers.AddedToken(name, special=True) for name in ("<s>", "</s>")]
    made.add_special_tokens(marks)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def text_of(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    stream = Detokenizer(tokenizer, prompt, ())
    return "".join([*map(stream.push, ids), stream.finish()])


@pytest.mark.parametrize("made", [of_bytes, of_words])
def test_no_token_has_all_before_it_decoded_again(made: Any) -> None:
    """Bytes that are no character, and special tokens behind a text and in front of one."""
    tokenizer = made()
    tokens = tokenizer.encode("é")[:1] if made is of_bytes else [0]
    for token in tokens:
        for prompt in ([token], [2], [2, token]):
            counting = Counting(tokenizer)
            text_of(counting, prompt, [token] * 1000)
            assert counting.decoded < 1000 * 50


def test_bytes_that_are_no_character_come_before_the_end() -> None:
    tokenizer = of_bytes()
    (byte,) = tokenizer.encode("é")[:1]
    stream = Detokenizer(tokenizer, [], ())
    assert sum(map(len, map(stream.push, [byte] * 100))) == 97
    assert stream.push(tokenizer.encode("a")[0]) == "���a"


@pytest.mark.parametrize("prompt", [[], [0], [0, 2], [0, 2, 3, 4, 5, 2, 3, 4]])
@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 5, 4, 3], [1, 5], [7, 3], [1] * 9 + [7, 3, 1, 5], [3, 7, 1, 3], [1, 7, 1, 1, 2],
    ],
)  # fmt: skip
def test_spaces_behind_special_tokens_stay(prompt: list[int], ids: list[int]) -> None:
    tokenizer = of_words()
    before, after = (tokenizer.decode(x, skip_special_tokens=True) for x in (prompt, prompt + ids))
    assert text_of(tokenizer, prompt, ids) == after[len(before) :]


def test_characters_of_several_bytes_are_put_together_whatever_is_between() -> None:
    tokenizer = of_bytes()
    draw, (mark,) = Random(1), tokenizer.encode("<s>")
    for _ in range(200):
        ids: list[int] = []
        for _ in range(draw.randint(1, 12)):
            ids += draw.choice([*map(tokenizer.encode, "aé猫😀 �"), [draw.randrange(256)], [mark]])
        assert text_of(tokenizer, [mark], ids) == tokenizer.decode(ids, skip_special_tokens=True)
