"""Traces from files, and the errors that name what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smkern.errors import TraceError
from smkern.replay import Arrival, load_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = HEAD + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"


def row(**changes: object) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
    return json.dumps({k: v for k, v in (fields | changes).items() if v is not None})


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure_times_have_seven_digits(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, "conv.csv", ROWS))
    assert trace.name == "conv"
    assert trace.requests[0] == Arrival(0.0, 374, 44)
    assert trace.requests[1].at_s == pytest.approx(4.314579, abs=1e-6)


def test_azure_times_of_2024_have_a_zone(tmp_path: Path) -> None:
    times = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:01+0200", "2024-05-10T00:00:02Z",
             "2024-05-10 00:00:02.5")  # fmt: skip
    text = HEAD + "".join(f"{time},9,5\n" for time in times)
    trace = load_trace(written(tmp_path, "week.csv", text))
    at_s = [request.at_s for request in trace.requests]
    assert at_s == pytest.approx([0.0, 0.99007, 1.99007, 2.49007], abs=1e-6)


def test_mooncake_has_named_blocks(tmp_path: Path) -> None:
    lines = [row(timestamp=3000), row(timestamp=4500, hash_ids=[7, 9])]
    trace = load_trace(written(tmp_path, "m.jsonl", "\n".join(lines)))
    assert trace.block_tokens == 512
    assert trace.requests == (Arrival(0.0, 600, 5, (7, 8)), Arrival(1.5, 600, 5, (7, 9)))


def test_ends_of_lines(tmp_path: Path) -> None:
    text = ROWS.replace("\n", "\r\n").replace(",44", ',"44"')
    assert len(load_trace(written(tmp_path, "a.csv", text))) == 2
    said = row(note="one\u2028two").encode().decode("unicode_escape")
    assert len(load_trace(written(tmp_path, "m.jsonl", f"{said}\r\n\n{said}"))) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens\n", ["line 1", "GeneratedTokens"]),
        ("", ["line 1", "TIMESTAMP,ContextTokens,GeneratedTokens"]),
        (HEAD, ["no requests"]),
        (HEAD + "yesterday,3,4\n", ["line 2", "TIMESTAMP='yesterday'"]),
        (HEAD + "2023-11-16 18:17:03.1e9,3,4\n", ["line 2", "TIMESTAMP='2023-11-16 18:17:03.1e9'"]),
        (HEAD + "2024-05-10 00:00:00+2,3,4\n", ["line 2", "2024-05-10 00:00:00.009930+00:00"]),
        (HEAD + "2023-11-16 18:15:46.68,3.5,4\n", ["line 2", "ContextTokens='3.5'"]),
        (HEAD + "2023-11-16 18:15:46.68,3\n", ["line 2", "GeneratedTokens=None"]),
        (HEAD + "2023-11-16 18:15:46,68,3,4\n", ["line 2", "more fields than the 3 columns"]),
        (HEAD.replace("\n", ",ContextTokens\n"), ["line 1", "ContextTokens names two columns"]),
        (ROWS + "9" * 200_000 + ",3,4\n", ["line 4", "no CSV", "field limit"]),
        (HEAD + "2023-11-16 18:15:46.68," + "9" * 5000 + ",0\n", ["line 2", "ContextTokens='9999"]),
        (HEAD + "2023-11-16 18:15:46.68,3,0\n", ["line 2", "GeneratedTokens='0'", "at least 1"]),
        (ROWS + "2023-11-16 18:15:49.995169,1,1\n", ["line 4", "1.000 s before", "sort"]),
    ],
)
def test_an_azure_row_that_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(TraceError) as error:
        load_trace(written(tmp_path, "a.csv", text))
    assert all(word in str(error.value) for word in ["a.csv", *words]), error.value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["no JSON"]),
        ("[1]", ["no object"]),
        (row(hash_ids=None), ["no field hash_ids"]),
        (row(timestamp="3"), ["timestamp='3'"]),
        (row(input_length=0), ["input_length=0"]),
        (row(output_length=2.5), ["output_length=2.5"]),
        (row(hash_ids=[7]), ["1 hash_ids for input_length=600", "2"]),
        (row(hash_ids=[7, "8"]), ["hash_ids=[7, '8']"]),
        (row(timestamp=0), ["before the one in front"]),
    ],
)
def test_a_mooncake_row_that_is_wrong_is_named(tmp_path: Path, line: str, words: list[str]) -> None:
    with pytest.raises(TraceError) as error:
        load_trace(written(tmp_path, "m.jsonl", row(timestamp=10) + "\n" + line + "\n"))
    assert all(word in str(error.value) for word in ["m.jsonl, line 2", *words]), error.value


def test_no_file_and_no_generator(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot be read.*sharegpt-like"):
        load_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match=r"no trace none-like.*sharegpt-like"):
        load_trace("none-like")
