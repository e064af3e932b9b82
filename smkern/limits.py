"""Limits of what is served, and checks of single numbers; messages give value, limit, remedy."""

from __future__ import annotations

import operator
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from smkern.errors import ArgumentError, DeviceError

HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128, 256)
MAX_SIZE = 2**31 - 1
MAX_REQUESTS = 16_384
"""The most requests of an attention plan: starts of their row blocks are in shared memory."""
MAX_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest of fp32."""
MIN_FLOAT = 2.0**-126
"""The smallest of fp32 that has all its bits, and whose inverse fp32 holds too."""

FP8_CAPABILITY = 89
"""The first compute capability with e4m3."""
FP8_MAX = 448.0
"""The largest of e4m3."""
FP8_BLOCK = 128
"""Columns of a block's scale, and rows of a weight's."""
FP8_NEGLIGIBLE = 2.0**-100
"""Values below it are zeros to e4m3 with scales: a scale keeps all bits of fp32."""


def shown(value: Any) -> str:
    """A value as a message shows it: not at length, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an integer of 5,000 digits, a tensor without memory
        text = f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:76]} ..."


def check_fp8_capability(capability: int) -> None:
    """Raise DeviceError for a GPU without e4m3."""
    if capability < FP8_CAPABILITY:
        raise DeviceError(
            f"compute capability {capability // 10}.{capability % 10} has no e4m3 (8.9 and later "
            "have): use bf16 weights"
        )


def as_index(value: Any) -> int:
    """A whole number; TypeError for anything else.

    A tensor is none: calls are remembered by the numbers that they were given, and a tensor is
    equal to itself whatever is written into it.
    """
    if not _is_tensor(value):
        with suppress(RuntimeError):  # whatever a value's own code says
            return operator.index(value)
    raise TypeError


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def as_int(name: str, value: Any, least: int, most: int | None = MAX_SIZE) -> int:
    """A whole number in [least, most]; ArgumentError for anything else."""
    try:
        number = as_index(value)
    except TypeError:
        raise ArgumentError(f"{name}={shown(value)} is no whole number: pass an int") from None
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        upper = "" if most is None else f" and at most {most}"
        raise ArgumentError(
            f"{name}={shown(value)}: give a whole number of at least {least}{upper}"
        )
    return number


def as_path(name: str, value: Any) -> Path:
    """A path; ArgumentError for anything else."""
    try:
        path = Path(value)
    except TypeError:
        raise ArgumentError(f"{name} is a {type(value).__name__}: pass a path") from None
    if "\0" in str(path):
        raise ArgumentError(f"{name}={str(path)!r} has a null byte, which no path has")
    return path


def as_float(name: str, value: Any, *, positive: bool = False) -> float:
    """A number that fp32 holds (above 0 where wanted); ArgumentError for anything else."""
    try:
        is_array = _is_tensor(value) or getattr(value, "ndim", None)
        if is_array or isinstance(value, str | bytes | bytearray):
            raise TypeError  # float() would take some of them
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: whatever a value's own code says
        raise ArgumentError(f"{name}={shown(value)} is no number: pass a float") from None
    except OverflowError:  # of a whole number
        number = float("inf")
    if not abs(number) <= MAX_FLOAT or (positive and number < MIN_FLOAT):
        wanted = "a finite number above 0" if positive else "a finite number"
        if MAX_FLOAT < abs(number) < float("inf"):
            wanted += f" of at most {MAX_FLOAT:g}, the largest of fp32"
        elif 0 < number < MIN_FLOAT:
            wanted += f" of at least {MIN_FLOAT:g}, the smallest of fp32"
        raise ArgumentError(f"{name}={number!r}: pass {wanted}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """True or False (1 and 0 too); ArgumentError for anything else, which would count as True."""
    if not (isinstance(value, int) and value in (0, 1)):
        raise ArgumentError(f"{name}={shown(value)}: pass True or False")
    return bool(value)
