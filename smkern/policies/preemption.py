"""Which waiting requests may go before a batch whose layers run, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from smkern.policies.admission import Batch, admitted
from smkern.policies.settings import Limits
from smkern.policies.snapshot import PrefillView, Snapshot, Waiting

KEPT = 4
"""Batches whose deadlines are remembered: two run or are preempted at a time."""

Cost = Callable[[Sequence[Waiting]], float]
"""Time of a batch of requests until their first tokens, us."""


def preempts(
    snapshot: Snapshot,
    *,
    left_us: float,
    deadline_us: float,
    cost_us: Cost,
    tokens: int,
    waiting: Iterable[Waiting] | None = None,
    shorter: bool = True,
) -> Batch:
    """The waiting requests that may go before the running batch: the first of their order, as many
    as leave it its deadline.

    Args:
        snapshot: The moment.
        left_us: What the running batch still takes.
        deadline_us: When the first of its tokens is wanted; infinity: no matter when.
        cost_us: What a batch of requests takes.
        tokens: New tokens that go first, at most.
        waiting: Those that may go first; None: all, in their order.
        shorter: Whether they must be over before it would have been.

    Source: DRIFT section 3.5, MuxWise section 3.4.2.
    """
    room_us = deadline_us - snapshot.now_us - left_us
    if shorter:
        room_us = min(room_us, left_us)
    if room_us <= 0:
        return ()
    chosen: Batch = ()
    for request in admitted(snapshot, tokens, waiting):
        longer = (*chosen, request)
        if cost_us(longer) >= room_us:
            break
        chosen = longer
    return chosen


class Turns:
    """Notes of the batches that a policy began and preempted.

    One level deep, and whoever has been preempted goes on by a group of layers before it is
    preempted again: then it ends, whatever comes and however far its deadline is.

    Args:
        limits: Deadlines of requests that bring none.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._deadlines: dict[int, float] = {}
        self._stopped: tuple[float, int] | None = None
        """The batch that was preempted last (when it began), and its layers then."""

    def begins(self, snapshot: Snapshot, batch: Batch, *, preempt: bool = False) -> None:
        """A batch is begun, in front of the running one or where none runs."""
        deadline_us = min(self._limits.deadline_us(request) for request in batch)
        self._deadlines[batch[0].id] = deadline_us
        while len(self._deadlines) > KEPT:
            del self._deadlines[next(iter(self._deadlines))]
        if preempt and snapshot.prefill is not None:
            self._stopped = _mark(snapshot.prefill)

    def may_preempt(self, snapshot: Snapshot) -> bool:
        """Whether the running batch may give way now."""
        running = snapshot.prefill
        if running is None or snapshot.preempted is not None or not snapshot.waiting:
            return False
        return self._stopped != _mark(running)

    def deadline_us(self, batch: PrefillView) -> float:
        """When the first of a batch's tokens is wanted."""
        return min(batch.deadline_us, self._deadlines.get(batch.ids[0], inf))


def _mark(batch: PrefillView) -> tuple[float, int]:
    return batch.started_us, batch.layers_launched
