"""Host time of a call in a loop, the device far enough behind that it never makes the host wait."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from smkern.measure.timing import Timing

CALLS = 200
"""Calls a trial: well under the 1,024 launches that a stream takes before it blocks the host."""
TRIALS = 25


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def host_time(
    call: Callable[[int], Any], *, calls: int = CALLS, trials: int = TRIALS, drain: bool = True
) -> Timing:
    """Time call(0), call(1), … by the host's clock; the device is drained between trials."""

    def finish() -> None:
        if drain:
            torch.cuda.synchronize()

    for i in range(min(calls, 64)):
        call(i)
    finish()
    found = []
    with no_garbage_collection():
        for _ in range(trials):
            begin = time.perf_counter_ns()
            for i in range(calls):
                call(i)
            found.append((time.perf_counter_ns() - begin) / calls / 1e3)
            finish()
    return Timing(tuple(found))
