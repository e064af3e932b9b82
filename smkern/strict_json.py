"""JSON of files that others may have written: anything but plain finite numbers is refused."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DIGITS = 19
"""Digits of a whole number: 64 bits hold no more."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON; or lists in lists too deep to read, a number that no double holds, NaN,
            or a whole number of more than 19 digits.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")  # as `json.loads` does
    # Looking at each number takes as long as reading a table of thousands of cells.
    is_long = b"0" * (MAX_DIGITS + 1) in text.encode(errors="surrogatepass").translate(_DIGITS)
    whole = _whole if is_long else int
    try:
        return json.loads(text, parse_int=whole, parse_float=_finite, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("its lists and objects lie too deep in each other") from None


def _whole(digits: str) -> int:
    if (count := len(digits.lstrip("-"))) > MAX_DIGITS:
        raise ValueError(f"{digits:.20}... has {count} digits, at most {MAX_DIGITS} are read")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError(f"{digits:.40} is more than a double holds")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
