"""What launches of a simulated executor do on the device: draw tokens, and check that they may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smkern.runtime.executor import PrefillChunk, PrefillRun
from smkern.runtime.place import Lane, Place
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.event import SimEvent
from smkern.runtime.sim.pool import SimPool
from smkern.runtime.sim.rows import Row, SimRows
from smkern.runtime.sim.tokens import TokenSource

Prepared = tuple[Callable[[Place], Any], Callable[[], list[int]]]
"""What to run, and its tokens once that is over."""


@dataclass(slots=True, eq=False)
class Launch:
    """What a launch draws, and its event once it is launched."""

    pool: SimPool
    event: SimEvent | None = None
    tokens: list[int] = field(default_factory=list)

    def read(self) -> list[int]:
        """The tokens, once the launch is over."""
        if self.event is None or self.event.ended_us is None:
            raise self.pool.hazard(f"tokens of {self.event} are read, which is not over")
        return self.tokens


@dataclass(slots=True, eq=False)
class _State:
    """A batch's own: layers launched so far, and its rows."""

    layers: int = 0
    rows: list[Row] = field(default_factory=list)


class CheckedLaunches:
    """Launches that draw a request's own tokens, and raise where a GPU would draw wrong ones."""

    def __init__(
        self, device: SimDevice, pool: SimPool, source: TokenSource, max_context: int
    ) -> None:
        self._device = device
        self._pool = pool
        self._rows = SimRows(pool, source, max_context)
        self._slots: dict[int, PrefillRun] = {}

    def begin(self, run: PrefillRun) -> None:
        """A batch's slot and rows.

        Raises:
            HazardError: the slot's buffers hold another batch.
        """
        old = self._slots.get(run.slot)
        if run.slot not in (0, 1) or (old is not None and self._is_running(old)):
            raise self._pool.hazard(
                f"slot {run.slot} for {[chunk.request for chunk in run.chunks]}: there are 0 and "
                f"1, {sorted(self._slots)} hold batches"
            )
        self._slots[run.slot] = run
        run.state = _State()
        for chunk in run.chunks:
            run.state.rows.append(self._rows.row(chunk.request, chunk.start))

    def prefill(self, run: PrefillRun, first: int, count: int, is_last: bool) -> Prepared:
        """Layers of a batch: what to run, and its tokens."""
        launch = Launch(self._pool)

        def start(place: Place) -> None:
            event = launch.event = self._event("prefill", place, ("prefill", "whole"))
            if first != run.state.layers or self._slots.get(run.slot) is not run:
                raise self._pool.hazard(
                    f"layers {first}..{first + count} of slot {run.slot}, of which "
                    f"{run.state.layers} are launched"
                )
            if first == 0:
                self._rows.overwrite(run.slot)
            for chunk in run.chunks:
                if self._rows.get(chunk.request) is not None:  # else it has left
                    self._rows.chunk(chunk, event, first == 0)
            run.state.layers += count
            if is_last:
                del self._slots[run.slot]
                last = [chunk for chunk in run.chunks if chunk.draws]
                launch.tokens = [self._rows.end_of_prompt(chunk, run.slot) for chunk in last]

        return start, launch.read

    def decode(self, rows: Sequence[Request]) -> Prepared:
        """A decode step: what to run, and its tokens."""
        launch = Launch(self._pool)

        def start(place: Place) -> None:
            event = launch.event = self._event("decode", place, ("decode", "whole"))
            launch.tokens = [self._rows.step(request, event) for request in rows]

        return start, launch.read

    def mixed(self, chunks: Sequence[PrefillChunk], rows: Sequence[Request]) -> Prepared:
        """A forward of chunks and decode rows: what to run, and its tokens."""
        launch = Launch(self._pool)

        def start(place: Place) -> None:
            event = launch.event = self._event("decode", place, ("whole",))
            if 0 in self._slots and self._is_running(self._slots[0]):
                raise self._pool.hazard("a mixed step while slot 0, whose rows it uses, is busy")
            drawn = [self._rows.step(request, event) for request in rows]
            self._rows.overwrite(0)
            for chunk in chunks:
                self._rows.row(chunk.request, chunk.start)
                self._rows.chunk(chunk, event, True)
            launch.tokens = [self._rows.end_of_prompt(p, 0) for p in chunks if p.draws] + drawn

        return start, launch.read

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request."""
        self._rows.forget(request)

    def check_batch(self, chunks: Sequence[PrefillChunk], max_prefill: int, most: int) -> None:
        """Raise HazardError for chunks that the buffers do not hold."""
        tokens = sum(chunk.count for chunk in chunks)
        if not 0 < len(chunks) <= max_prefill or tokens > most:
            raise self._pool.hazard(
                f"{len(chunks)} prompts of {tokens} new tokens: 1 to {max_prefill} of {most} in all"
            )
        for chunk in chunks:
            end = chunk.end
            if chunk.count < 1 or chunk.draws != (end == len(chunk.request.ids)):
                raise self._pool.hazard(f"{chunk}, of {len(chunk.request.ids)} tokens")

    def check_rows(self, requests: Sequence[Request], max_running: int) -> None:
        """Raise HazardError for too many rows, or one twice."""
        if len(requests) > max_running or len(set(requests)) < len(requests):
            raise self._pool.hazard(
                f"{len(requests)} requests, {len(set(requests))} different: {max_running} decode "
                "at a time, each once"
            )

    def _is_running(self, run: PrefillRun) -> bool:
        """Whether a batch's layers are still to come, and any of its requests is there."""
        rows = zip(run.chunks, run.state.rows, strict=True)
        return any(self._rows.get(chunk.request) is row for chunk, row in rows)

    def _event(self, lane: Lane, place: Place, sides: tuple[str, ...]) -> SimEvent:
        event = self._device.launching
        assert event is not None, "work of a simulated executor runs on its device alone"
        if event.lane != lane or place.side not in sides:
            raise self._pool.hazard(
                f"launch {event.number} on the {event.lane} lane at {place}: it belongs to the "
                f"{lane} lane, on one of {sides}"
            )
        return event


class ConstantLaunches:
    """Launches that draw one and the same token for every row, and check nothing."""

    def __init__(self, token: int) -> None:
        self._token = token
        self._drawn: dict[int, Prepared] = {}

    def begin(self, run: PrefillRun) -> None:
        """Nothing is kept."""

    def prefill(self, run: PrefillRun, first: int, count: int, is_last: bool) -> Prepared:
        """Layers of a batch."""
        return self._of(sum([chunk.draws for chunk in run.chunks]) if is_last else 0)

    def decode(self, rows: Sequence[Request]) -> Prepared:
        """A decode step."""
        return self._of(len(rows))

    def mixed(self, chunks: Sequence[PrefillChunk], rows: Sequence[Request]) -> Prepared:
        """A forward of chunks and decode rows."""
        return self._of(len(rows) + sum([chunk.draws for chunk in chunks]))

    def forget(self, request: Request) -> None:
        """Nothing was kept."""

    def check_batch(self, chunks: Sequence[PrefillChunk], max_prefill: int, most: int) -> None:
        """Not checked."""

    def check_rows(self, requests: Sequence[Request], max_running: int) -> None:
        """Not checked."""

    def _of(self, rows: int) -> Prepared:
        found = self._drawn.get(rows)
        if found is None:
            tokens = [self._token] * rows
            found = self._drawn[rows] = _nothing, lambda: tokens
        return found


def _nothing(place: Place) -> None:
    """Launches nothing."""
