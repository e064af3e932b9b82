"""When each request's tokens came, kept by step: for replays of very many requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

TRIM = 4096
"""Requests that are forgotten between two looks at what no other needs."""


class StepLog:
    """Times at which tokens were delivered: one a step, and which steps each request was in.

    Eight bytes a step and two numbers a request, where a record a token would be a hundred times
    that. Steps that only forgotten requests were in are dropped.

    Attributes:
        num_steps: Steps so far, each one launch whose tokens were delivered.

    Example:
        >>> log = StepLog()
        >>> first = log.add_steps([10.0, 20.0, 30.0])
        >>> log.add_tokens(7, first, 2), log.add_tokens(8, first + 2, 1)
        (None, None)
        >>> list(log.token_us(7))
        [10.0, 20.0]
    """

    __slots__ = ("_dropped", "_forgotten", "_runs", "_times")

    def __init__(self) -> None:
        self._times = array("d")
        self._dropped = 0
        self._runs: dict[int, list[int]] = {}
        self._forgotten = 0

    @property
    def num_steps(self) -> int:
        return self._dropped + len(self._times)

    def add_steps(self, times_us: Iterable[float]) -> int:
        """Steps whose tokens were delivered at these times; the number of the first."""
        first = self._dropped + len(self._times)
        self._times.extend(times_us)
        return first

    def add_tokens(self, id: int, first: int, count: int) -> None:
        """A request had a token in each of `count` steps from `first` on."""
        run = self._runs.get(id)
        if run is None:
            self._runs[id] = [first, first + count]
        elif run[-1] == first:
            run[-1] = first + count
        else:
            run += (first, first + count)

    def token_us(self, id: int) -> array[float]:
        """When each of a request's tokens was delivered, on the device's clock; empty where it has
        none, or was forgotten."""
        run, times, dropped = self._runs.get(id, ()), self._times, self._dropped
        found = array("d")
        for i in range(0, len(run), 2):
            found += times[run[i] - dropped : run[i + 1] - dropped]
        return found

    def forget(self, id: int) -> None:
        """A request's times are wanted no more; one that has none may be forgotten, too."""
        self._runs.pop(id, None)
        self._forgotten += 1
        if self._forgotten >= TRIM:
            self._forgotten = 0
            first = min((run[0] for run in self._runs.values()), default=self.num_steps)
            del self._times[: first - self._dropped]
            self._dropped = first
