"""JSON of files that others may have written: anything but plain finite numbers is refused."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DIGITS = 19
"""Digits of a whole number: 64 bits hold no more."""
_ALIKE = bytes.maketrans(b"E123456789", b"e" + b"0" * 9)
_LARGE = (b"0" * (MAX_DIGITS + 1), b"e000", b"e+000")
"""What a number that is refused holds, all digits being zeros; without it none is above 1e119."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON; or lists in lists too deep to read, a number that no double holds, NaN,
            or a whole number of more than 19 digits.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")  # as `json.loads` does
    # A call for each number nearly doubles the time of a text that is mostly numbers.
    digits = text.encode(errors="surrogatepass").translate(_ALIKE)
    is_large = any(large in digits for large in _LARGE)
    whole, real = (_whole, _finite) if is_large else (int, float)
    try:
        return json.loads(text, parse_int=whole, parse_float=real, parse_constant=_no_constant)
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
