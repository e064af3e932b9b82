"""Rank 0: an executor whose calls and launches all ranks carry out, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from smkern.errors import ArgumentError
from smkern.partition import Partition
from smkern.runtime.device import Device, Event, Work
from smkern.runtime.executor import Draw, Executor, MemoryReport, PrefillChunk, PrefillRun
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.place import Lane, Place
from smkern.runtime.ranks.channel import Links
from smkern.runtime.ranks.records import Told, chunk_records
from smkern.runtime.request import Request

Result = TypeVar("Result")


class _RankEvent:
    """The end of a launch here; the other ranks hear of it when it is seen."""

    __slots__ = ("_event", "_is_over", "_links", "_number")

    def __init__(self, links: Links, number: int, event: Event) -> None:
        self._links = links
        self._number = number
        self._event = event
        self._is_over = False

    def query(self) -> bool:
        if self._is_over:
            return True
        answer = self._event.query()
        if answer is True:
            self._is_over = True
            self._links.over(self._number)
        return answer

    def times_us(self) -> tuple[float, float] | None:
        return self._event.times_us()


class RankDevice(Device):
    """Rank 0's device: what is launched here is launched on all ranks, at the same places.

    Nothing is launched before all ranks have prepared it. What a launch waits for here by its
    event, the others wait for by theirs, before they launch what follows.

    Lanes never share SMs, whatever a policy asks for: they take turns. On SMs of both, one GPU may
    run a sum of prompts and the other one of decode; each holds what the other's needs, and waits.
    """

    def __init__(self, device: Device, links: Links) -> None:
        self._device = device
        self._links = links
        self._works: dict[int, tuple[Work, int, int]] = {}
        """By `id` of a work that was not launched: it, the call that prepared it, and its place
        among that call's."""
        self.num_sms = device.num_sms
        self.rungs = device.rungs
        self.can_share = False

    def prepared(self, works: Sequence[Work], call: int) -> None:
        """A call's works, to be launched before the next call that prepares any, or dropped."""
        self._works = {id(work): (work, call, index) for index, work in enumerate(works)}

    def now_us(self) -> float:
        self._links.check()  # every turn of the loop looks at the clock
        return self._device.now_us()

    def launch(self, lane: Lane, place: Place, work: Work) -> Event:
        found = self._works.pop(id(work), None)
        if found is None and work.launches:
            raise ArgumentError(
                f"{work.name!r} was not prepared by the last call of this executor: the other "
                "ranks cannot launch it"
            )
        if found is not None:
            self._links.accepted(found[1])
        number = self._links.tell("launch", lane, place, found and found[1:])
        try:
            event = self._device.launch(lane, place, work)
        except Exception as error:
            self._links.failed_here(number, error)
            raise
        return _RankEvent(self._links, number, event)

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        self._device.wait(events, until_us)

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        self._device.behind(lane, run)

    def synchronize(self) -> None:
        self._device.synchronize()

    def partition(self, place: Place) -> Partition | None:
        return self._device.partition(place)


class RankExecutor(Executor):
    """Rank 0's executor, for a `Multiplexer`: its calls and launches are carried out by all ranks.

    The other ranks run `follow`. Decisions are made here alone, from this rank's events. A rank
    that is gone, hangs, or raises where this one does not ends the run with a `RankError` that
    names it, on all ranks.

    Args:
        executor: This rank's.
        links: To the other ranks.

    Example:
        >>> executor = RankExecutor(ModelExecutor(decoder, pool), open_links(tp))  # doctest: +SKIP
        >>> mux = Multiplexer(executor)                                        # doctest: +SKIP
    """

    def __init__(self, executor: ModelExecutor, links: Links) -> None:
        self._executor = executor
        self._links = links
        self.device: RankDevice = RankDevice(executor.device, links)
        self._told = Told(executor.pool)
        self.config = executor.config
        self.pool = executor.pool
        self.max_running = executor.max_running
        self.max_prefill = executor.max_prefill
        self.max_tokens = executor.max_tokens
        self.max_context = executor.max_context

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        records = self._told.records([chunk.request for chunk in chunks])
        call = self._links.tell("begin", records, chunk_records(chunks), slot)
        return self._here(call, lambda: self._executor.begin(chunks, slot))

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        call = self._links.tell("prefill", run.slot, first, count)
        work = self._here(call, lambda: self._executor.prefill(run, first, count))
        self.device.prepared([work], call)
        return work

    def decode(self, requests: Sequence[Request], steps: int) -> list[tuple[Work, Draw]]:
        call = self._links.tell("decode", self._told.records(requests), steps)
        works = self._here(call, lambda: self._executor.decode(requests, steps))
        self.device.prepared([work for work, _ in works], call)
        return works

    def prepare_next(self, requests: Sequence[Request], steps: int) -> None:
        call = self._links.tell("prepare_next", self._told.records(requests), steps)
        self._here(call, lambda: self._executor.prepare_next(requests, steps))

    def mixed(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[Request]
    ) -> tuple[Work, Draw]:
        records = self._told.records([*(chunk.request for chunk in chunks), *requests])
        call = self._links.tell(
            "mixed", records, chunk_records(chunks), [request.index for request in requests]
        )
        work, draw = self._here(call, lambda: self._executor.mixed(chunks, requests))
        self.device.prepared([work], call)
        return work, draw

    def ready_rungs(self, batch: int, longest: int) -> tuple[int | None, ...] | None:
        return self._executor.ready_rungs(batch, longest)

    def forget(self, request: Request) -> None:
        if self._told.forget(request):
            self._links.tell("forget", request.index)
        self._executor.forget(request)

    def idle(self) -> None:
        if not self._executor.graphs.missed:
            return
        call = self._links.tell("idle")
        self._here(call, self._executor.idle)
        # A graph that only some have serves other rows here than there.
        self._links.accepted(
            self._links.tell("same_graphs", sorted(self._executor.graphs.by_graph))
        )

    def memory_report(self) -> MemoryReport:
        return self._executor.memory_report()

    def close(self) -> None:
        self._links.close()
        if not self._links.is_dead:  # else a sum may never end: the process must
            self._executor.close()

    def _here(self, call: int, run: Callable[[], Result]) -> Result:
        """Carry a call out on this rank; where it raises, it must on all."""
        try:
            return run()
        except Exception as error:
            self._links.failed_here(call, error)
            raise
