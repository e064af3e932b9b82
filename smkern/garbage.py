"""Python's garbage collection in a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FULL_AFTER = 1000
"""Collections of the middle generation between two full ones: some 7 million objects more."""


def collect_young() -> None:
    """Collect what is young now where that would be due soon, as nothing else is to be done.

    Python collects when something is made, which in a serving loop is while tokens are handed out:
    0.3 ms for the youngest, 2 to 6 ms for the next generation on an H200's host. Where collecting
    is off it stays off.
    """
    first, second, _ = gc.get_threshold()
    young, middle, _ = gc.get_count()
    if gc.isenabled() and 0 < first < 2 * young:
        gc.collect(1 if second < 2 * middle else 0)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside the block full collections leave out what exists now, and are seldom.

    One visits every object of the process, a microsecond each where caches are cold, and no token
    is handed out meanwhile: 0.2 to 0.7 s with all that torch has, 30 to 85 ms for half a minute's
    requests and records alone. For the process of a server, as it holds for all that runs there;
    what others froze before stays so.

    Example:
        >>> with seldom_collected():
        ...     gc.get_threshold()[2]
        1000
    """
    first, middle, full = gc.get_threshold()
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(first, middle, FULL_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(first, middle, full)
        if not before:
            gc.unfreeze()
