"""Limits of what is served, and checks of single numbers; messages give value, limit, remedy."""

from __future__ import annotations

import operator
from typing import Any

from smkern.errors import ArgumentError

HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128, 256)
MAX_SIZE = 2**31 - 1
MAX_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest of fp32."""


def as_int(name: str, value: Any, least: int, most: int | None = MAX_SIZE) -> int:
    """A whole number in [least, most]; ArgumentError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}={value!r} is no whole number: pass an int") from None
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        upper = "" if most is None else f" and at most {most}"
        raise ArgumentError(f"{name}={value!r}: give a whole number of at least {least}{upper}")
    return number


def as_float(name: str, value: Any, *, positive: bool = False) -> float:
    """A number that fp32 holds (above 0 where wanted); ArgumentError for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}={value!r} is no number: pass a float, or None") from None
    except OverflowError:  # of a whole number
        number = float("inf")
    if not abs(number) <= MAX_FLOAT or (positive and number <= 0):
        wanted = "a finite number above 0" if positive else "a finite number"
        if MAX_FLOAT < abs(number) < float("inf"):
            wanted += f" of at most {MAX_FLOAT:g}, the largest of fp32"
        raise ArgumentError(f"{name}={number!r}: pass {wanted}, or None")
    return number
