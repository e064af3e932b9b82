"""The largest number that fits, sought near one that fitted before."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int, near: int) -> int:
    """The largest of 1..most that fits, where all below one that fits do too; 1 where none does.

    Two questions where the answer is `near`, about 2 log2 of the distance otherwise.

    Args:
        fits: Asked about numbers of 2..most.
        most: At least 1.
        near: Where to begin.
    """
    low, high = 1, most  # the answer is one of these
    step, middle = 1, min(max(near, 1), most)
    while low < high:
        if middle == 1 or fits(middle):
            low = middle
            middle = low + step
        else:
            high = middle - 1
            middle = high - step + 1
        step *= 2
        if not low < middle <= high:
            middle = (low + high + 1) // 2
    return low


def least(fits: Callable[[int], bool], count: int, near: int) -> int:
    """The least of 0..count-1 that fits, where all above one that fits do too; `count` where none
    does.

    Two questions where the answer is `near`, about 2 log2 of the distance otherwise.

    Args:
        fits: Asked about numbers of 0..count-1.
        count: At least 1.
        near: Where to begin.
    """
    # Mirrored, the largest of 1..count + 1 whose mirror image fits, 1 standing for none.
    return count + 1 - largest(lambda k: fits(count + 1 - k), count + 1, count + 1 - near)
