"""The largest setting that keeps a limit, among settings whose steps take longer and longer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")


def last_kept(
    settings: Sequence[int], keeps: Callable[[int], Generator[T, None, bool]]
) -> Generator[T, None, int]:
    """Index of the last setting that keeps a limit, by halves; 0 where none does.

    Args:
        settings: In growing order, not empty.
        keeps: Whether a setting keeps the limit; those above one that does not do not, either.
            Yields what was measured for that.
    """
    low, high = 0, len(settings)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (yield from keeps(settings[middle])) else (low, middle)
    return low
