"""Tokenizers of a folder; text as tokens come: characters of several tokens, stop texts."""

from __future__ import annotations

import ast
import json
import os
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
