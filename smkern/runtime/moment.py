"""The state of a runtime as a policy sees it; what a policy rarely asks is made when it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from smkern.latency import Size
from smkern.policies import Ended, Running, Snapshot
from smkern.policies.snapshot import Trigger
from smkern.runtime.device import Event, times_us
from smkern.runtime.executor import Executor
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.place import Lane
from smkern.runtime.queues import RequestQueues
from smkern.runtime.request import Request
from smkern.runtime.ticket import Ticket

ENDED = 64
"""Launches that are remembered until the policy is asked."""

Item = TypeVar("Item")
_Over = tuple[Lane, int, Size, float, Event, float]
"""A launch that was over, whose times were not asked yet: that takes some 6 us on a GPU."""


class MadeOnce(Sequence[Item]):
    """A sequence that is made when it is first looked at.

    Args:
        make: Makes it, of what follows.
        of: What `make` is called with.
    """

    __slots__ = ("_items", "_make", "_of")

    def __init__(self, make: Callable[[Any], tuple[Item, ...]], of: Any) -> None:
        self._make: Callable[[Any], tuple[Item, ...]] | None = make
        self._of = of

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __repr__(self) -> str:
        return repr(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == (other._all() if isinstance(other, MadeOnce) else other)

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple[Item, ...]:
        make = self._make
        if make is not None:
            self._items: tuple[Item, ...] = make(self._of)
            self._make = self._of = None
        return self._items


class Observer:
    """Makes snapshots of a runtime.

    Args:
        executor, lanes, queues, launcher: What is looked at.
    """

    def __init__(
        self, executor: Executor, lanes: Interleaver, queues: RequestQueues, launcher: BatchLauncher
    ) -> None:
        self._executor = executor
        self._lanes = lanes
        self._queues = queues
        self._launcher = launcher
        self._ended: list[_Over] = []
        # What stays the same of all moments.
        self._moment = partial(
            Snapshot,
            rungs=executor.device.rungs,
            num_sms=executor.device.num_sms,
            num_layers=executor.config.num_layers,
            page_size=executor.pool.page_size,
            max_running=executor.max_running,
            max_prefill=executor.max_prefill,
            max_tokens=executor.max_tokens,
        )

    def over(self, tickets: Iterable[Ticket]) -> None:
        """Launches were seen over."""
        for ticket in tickets:
            work = ticket.work
            if work.size is not None:
                # Not the ticket: its work holds what it launches, such as tensors.
                about = ticket.lane, ticket.place.num_sms, work.size, ticket.host_us
                assert ticket.seen_us is not None
                self._ended.append((*about, ticket.event, ticket.seen_us))
        if len(self._ended) > ENDED:
            del self._ended[:-ENDED]

    def look(self, trigger: Trigger, rung: int | None) -> Snapshot:
        """This moment.

        Args:
            trigger: Why the policy is asked.
            rung: What it last decided.
        """
        queues, launcher = self._queues, self._launcher
        now_us = self._lanes.device.now_us()
        steady = launcher.steady
        running = queues.running
        if steady is not None:
            lengths, longest, oldest = steady.lengths, steady.longest, steady.token_us
        else:
            lengths = tuple([len(request.ids) + request.num_pending for request in running])
            longest, oldest = max(lengths, default=0), 0.0
        if not oldest:
            # A token that is on its way for the first time was never delivered.
            seen = [request.token_us for request in running if request.token_us]
            oldest = min(seen, default=now_us)
        batch, preempted = launcher.batch, launcher.preempted
        ended: Sequence[Ended] = ()
        if self._ended:
            ended, self._ended = MadeOnce(_times, self._ended), []
        waiting = queues.views()
        return self._moment(
            now_us=now_us,
            trigger=trigger,
            waiting=waiting,
            prefill=None if batch is None else batch.view(),
            preempted=None if preempted is None else preempted.view(),
            running_kv=lengths,
            token_age_us=now_us - oldest,
            decode_queued=self._lanes.queued("decode"),
            prefill_queued=self._lanes.queued("prefill"),
            rung=rung,
            free_pages=queues.pool.num_available,
            joining=launcher.joining,
            more_waiting=len(queues.waiting) - len(waiting),
            ready_rungs=self._executor.ready_rungs(len(lengths), longest) if lengths else None,
            running=MadeOnce(Observer._all_running, self) if running else (),
            ended=ended,
        )

    def _all_running(self) -> tuple[Running, ...]:
        self._launcher.flush()
        return tuple([_running(request) for request in self._queues.running])


def _times(launches: Iterable[_Over]) -> tuple[Ended, ...]:
    """The launches with the times of those that the device knows."""
    found = []
    for lane, num_sms, size, host_us, event, seen_us in launches:
        times = times_us(event)
        if times is not None:
            found.append(Ended(lane, num_sms, size, *times, seen_us, host_us))
    return tuple(sorted(found, key=lambda ended: ended.ended_us))


def _running(request: Request) -> Running:
    return Running(
        request.index,
        request.arrival_us,
        request.prompt_len,
        len(request.ids) - request.prompt_len + len(request.to_repeat),
        request.first_token_us,
        request.token_us,
        request.priority,
    )
