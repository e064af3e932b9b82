"""JSON that others may have written: what is read, and what is refused as ValueError."""

from __future__ import annotations

import pytest

from smkern.strict_json import parse


def test_what_json_says_is_read() -> None:
    text = '{"a": [1, -2.5, 1e3, "NaN", null, true], "b": -9223372036854775808, "c": 9e-400}'
    assert parse(text) == {
        "a": [1, -2.5, 1000.0, "NaN", None, True], "b": -(2**63), "c": 0.0,
    }  # fmt: skip
    assert parse(b"[]") == []
    long = f"in a text {'1' * 30}"
    assert parse(f'["{long}", 12, {"9" * 19}]') == [long, 12, int("9" * 19)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[" * 200_000, "too deep"),
        ('{"a":' * 200_000, "too deep"),
        ("1" * 5000, "5000 digits, at most 19"),
        ("-" + "1" * 20, "20 digits"),
        ("[1e999]", "1e999 is more than a double holds"),
        ("[0.1E+400]", r"0\.1E\+400 is more than a double holds"),
        (f"[{'1' * 400}.5]", "is more than a double holds"),
        ("-Infinity", "-Infinity is no JSON"),
        ('{"a": NaN}', "NaN is no JSON"),
    ],
)
def test_anything_else_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="decode"):
        parse(b'"\xff"')
