"""Decode steps that are alike, in one go: what a replay of very many requests spends itself on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from smkern.latency import Size
from smkern.runtime.device import Work
from smkern.runtime.executor import Executor
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.launcher import PLENTY, BatchLauncher
from smkern.runtime.output_processor import OutputProcessor
from smkern.runtime.queues import RequestQueues
from smkern.runtime.scheduler import Scheduler
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.steady_batch import SteadyBatch
from smkern.runtime.ticket import Ticket
from smkern.runtime.watchdog import Watchdog

Skip = Callable[[float | None], None]
DEEPEST = 2
"""Decode steps on their way, the most that is skipped over."""


def fast_forward(
    executor: Executor, policy: Any, is_recorded: bool, lanes: Interleaver, queues: RequestQueues,
    launcher: BatchLauncher, outputs: OutputProcessor, scheduler: Scheduler, watchdog: Watchdog,
) -> Skip | None:  # fmt: skip
    """What skips over steps that are alike; None where somebody looks at each of them.

    Args:
        executor: Runs the steps: a `SimExecutor` without checks.
        policy: Says with `decodes_alone_steadily` that it need not be asked at each.
        is_recorded: Whether a timeline or an output is made of each.
        lanes, queues, launcher, outputs, scheduler, watchdog: The loop's.
    """
    device = executor.device
    if is_recorded or not isinstance(device, SimDevice) or executor.pool.has_memory:
        return None
    if getattr(executor, "checks", True) or not getattr(policy, "decodes_alone_steadily", False):
        return None
    return FastForward(device, lanes, queues, launcher, outputs, scheduler, watchdog)


@dataclass(slots=True, eq=False)
class FastForward:
    """Takes a steady batch from one event to the next, in the times of the steps one by one.

    While nothing waits and no prompt is computed, a policy that decodes steadily answers the same
    at the end of each step, and the next step is the last one with one key a row more. Until a
    request comes or ends, or pages become short, the steps' times are added up as the device adds
    them, and what is on its way is moved to where it would be then.
    """

    _device: SimDevice
    _lanes: Interleaver
    _queues: RequestQueues
    _launcher: BatchLauncher
    _outputs: OutputProcessor
    _scheduler: Scheduler
    _watchdog: Watchdog

    def __call__(self, until_us: float | None) -> None:
        """Skip the steps that end before a moment; None: there is no such moment."""
        launcher, queues = self._launcher, self._queues
        steps = self._scheduler.steady_steps
        if not 0 < steps <= DEEPEST or queues.waiting or queues.paused or launcher.batch:
            return
        tickets, steady = self._lanes.tickets("decode"), launcher.steady
        if steady is None or not steps == len(tickets) == len(launcher.in_flight):
            return
        target = self._lanes.target("decode")
        if any(x.place != target or launcher.in_flight[x].steady is not steady for x in tickets):
            return
        most = self._most(steady, launcher.in_flight[tickets[0]].number, steps)
        if most <= 0 or not self._outputs.is_counting:
            return
        times = repeat(self._device, most, inf if until_us is None else until_us)
        if times:
            self._moved(tickets, steady, times)

    def _most(self, steady: SteadyBatch, number: int, steps: int) -> int:
        """Steps that may be skipped: none ends a request, and pages stay plenty."""
        batch, pool = len(steady.requests), self._queues.pool
        before_ends = steady.least_left + steady.launched - number - (steps - 1)
        spare = (pool.num_available - PLENTY * batch - 1) // batch - 1
        return min(before_ends, spare * pool.page_size)

    def _moved(self, tickets: tuple[Ticket, ...], steady: SteadyBatch, times: list[float]) -> None:
        """The steps on their way are so many later ones; tokens of those before are delivered."""
        count, in_flight = len(times), self._launcher.in_flight
        self._outputs.skipped(in_flight[tickets[0]], times)
        steady.skip(self._queues, count)
        steady.token_us = times[-1]
        self._lanes.skipped(count)
        for ticket in tickets:
            ticket.number += count
            ticket.launched_us = times[-1]
            ticket.work = _later(ticket.work, count)
            in_flight[ticket].number += count
        self._watchdog.look(times[-1], True, in_flight, True)


def _later(work: Work, steps: int) -> Work:
    assert work.size is not None
    size = replace(work.size, total_kv=work.size.total_kv + steps * work.size.batch)
    return replace(work, size=size)


def repeat(device: SimDevice, most: int, until_us: float) -> list[float]:
    """Let decode steps, the only work there is, end one after another, each followed by a launch
    like the last with a key a row more: in the times that `wait` and `launch` give.

    Args:
        most: Steps that may end.
        until_us: Only those that end before this are let.

    Returns:
        When each ended. What is queued then are so many later steps, in the place of those that
        were.
    """
    items = list(device._lanes["decode"])
    assert 1 <= len(items) <= 2, items
    assert device.predictor is not None
    if device._faults or device.has_failed or not device._begin(items[0]):
        return []
    size, num_sms, cost = items[-1].size, items[-1].place.num_sms, device._decode_launch_us
    assert size is not None
    keys, now, done = size.total_kv, device._now, items[0].done_us
    ends: list[float] = []
    alone = [item.alone_us for item in items]
    while len(ends) < most and (end := now + (alone[0] - done)) < until_us:
        if len(alone) == 2 and cost >= alone[1]:
            break  # it would be over before the host has launched the next
        keys += size.batch
        later = Size((), size.layers, size.num_layers, False, size.batch, keys)
        alone = [*alone[1:], device.predictor.alone_us(later, num_sms) + device.decode_gap_us]
        now = end + cost
        # while the host launches, the one behind runs, if there is one
        done = now - end if len(alone) == 2 else 0.0
        ends.append(end)
    if not ends:
        return ends
    for item, us in zip(items, alone, strict=True):
        assert item.size is not None
        item.size = replace(item.size, total_kv=item.size.total_kv + len(ends) * size.batch)
        item.alone_us = item.launched_us = us
        item.done_us, item.event.began_us = 0.0, None
        item.event.number += len(ends)
    if len(items) == 2:
        items[0].done_us, items[0].event.began_us = done, ends[-1]
    device._now = now
    device.launches += len(ends)
    return ends
