"""What ran where and when: recorded in the serving loop, put in order outside of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError
from smkern.limits import as_path
from smkern.runtime.device import times_us
from smkern.runtime.place import LANES, Lane
from smkern.runtime.ticket import Ticket
from smkern.runtime.timeline.trace import Choice, Note, Reader, Span, State, Trace, predicted

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor
    from smkern.policies.decision import Decision
    from smkern.policies.snapshot import Snapshot

CAPACITY = 20_000
"""Launches that are kept: two minutes at 150 a second, about 20 MB."""
BACKLOG = 4096
"""Records not put in order yet before recording one puts two in order: 2,000 launches' events."""
SETTLE_S = 30e-6
"""For so long records are put in order between two polls."""


class Timeline:
    """Launches, decisions and what there was to do, the latest of them.

    Recording appends a tuple (under 1 us); `settle`, which costs more, asks the events for their
    times and is called while there is nothing else to do, or by whatever reads.

    Args:
        num_sms: SMs of the device.
        clock: Microseconds, the device's (`Device.now_us`); None: the latest time recorded.
        capacity: Launches that are kept, and of decisions, states and notes no more, and none
            from before the oldest of those launches; 0: nothing.
        predictor: Says how long launches should take, when the timeline is read.

    Attributes:
        latest_state: What there is to do, as far as records are in order.

    Raises:
        ArgumentError: a negative capacity, or no SM.

    Example:
        >>> timeline = Timeline(132)
        >>> timeline.note("warm", batch=8)
        >>> [note.name for note in timeline.trace().notes]
        ['warm']
    """

    def __init__(
        self,
        num_sms: int,
        *,
        clock: Callable[[], float] | None = None,
        capacity: int = CAPACITY,
        predictor: Predictor | None = None,
    ) -> None:
        if capacity < 0:
            raise ArgumentError(f"capacity={capacity}: give 0 to keep nothing, or more")
        if num_sms < 1:
            raise ArgumentError(f"num_sms={num_sms}: a device has at least 1")
        self.num_sms = num_sms
        self.predictor = predictor
        self._clock = clock or self._latest
        self._latest_us = 0.0
        self._open: dict[int, Ticket] = {}
        self._log: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._choices: deque[Choice] = deque(maxlen=capacity)
        self._states: deque[State] = deque(maxlen=capacity)
        self._notes: deque[Note] = deque(maxlen=capacity)
        self._ends: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.latest_state = State(0.0)
        self._readers: list[Reader] = []
        self._dropped = 0

    is_off = False

    @staticmethod
    def off(num_sms: int) -> Timeline:
        """One that records nothing, for replays whose requests' times are all that is wanted."""
        return _Off(num_sms, capacity=0)

    # Recording: in the serving loop.

    def launched(self, ticket: Ticket) -> None:
        """A launch; for `Interleaver(on_launch=)`."""
        self._open[ticket.number] = ticket

    def over(self, ticket: Ticket) -> None:
        """A launch that was seen over; for `Interleaver(on_over=)`.

        Its event is asked for its times later, in `settle`.
        """
        self._open.pop(ticket.number, None)
        # Not the ticket: its work holds what it launches, such as tensors.
        work = ticket.work
        self._log.append(
            (
                self._over,
                (ticket.number, ticket.lane, ticket.place, work.name, ticket.launched_us,
                 ticket.seen_us, ticket.event, work.launches, work.size, work.about),
            )
        )  # fmt: skip
        if len(self._log) > BACKLOG:
            self.settle(2)

    def later(self, handle: Callable[..., None], *record: Any) -> None:
        """Call `handle(*record)` in `settle`, in its turn; for what counts beside the timeline."""
        self._log.append((handle, record))
        if len(self._log) > BACKLOG:
            self.settle(2)

    def later_each(self, handle: Callable[..., None], records: Iterable[tuple[Any, ...]]) -> None:
        """As `later`, for several records; each is put in order by itself."""
        self._log.extend([(handle, record) for record in records])
        if len(self._log) > BACKLOG:
            self.settle(8)

    def decided(self, snapshot: Snapshot, decision: Decision) -> None:
        """A policy's decision, and by its snapshot what there is to do."""
        self._log.append((self._decided, (self._clock(), snapshot, decision)))

    def state(self, at_us: float, *, decoding: int, prefilling: int = 0, waiting: int = 0) -> None:
        """What there is to do from now on: what a decision has changed, or that nothing is left.

        Args:
            at_us: The clock.
            decoding: Requests that decode.
            prefilling: Requests whose prompts are on their way through the layers.
            waiting: Requests that wait for that; whether none can begin is as it was when the
                policy was last asked.
        """
        self._log.append((self._stated, (at_us, decoding, prefilling, waiting)))
        if len(self._log) > BACKLOG:  # not `decided`: that is called in front of launches
            self.settle(4)

    def note(self, name: str, **about: Any) -> None:
        """Something else worth seeing: an error, a preemption, a cancellation."""
        self.later(self._noted, self._clock(), name, about)

    def abandoned(self, tickets: Iterable[Ticket]) -> None:
        """Launches given up after an error of the device; for what `Interleaver.abandon` gave."""
        now_us = self._clock()
        for ticket in tickets:
            self._open.pop(ticket.number, None)
            self._log.append((self._add, (_unfinished(ticket, now_us),)))

    # Reading: while nothing else is to be done.

    def attach(self, reader: Reader) -> None:
        """Tell a reader what is put in order from now on."""
        self._readers.append(reader)

    def settle(self, limit: int | None = None) -> int:
        """Put records in order, the oldest first; how many are left.

        Args:
            limit: Records to put in order, a few microseconds each; None: all.
        """
        log = self._log
        count = len(log) if limit is None else min(limit, len(log))
        for _ in range(count):
            handle, record = log.popleft()
            handle(*record)
        return len(log)

    def settle_briefly(self) -> bool:
        """Put records in order for some `SETTLE_S`, between two polls; whether none is left."""
        end_s = perf_counter() + SETTLE_S
        while self.settle(1):
            if perf_counter() > end_s:
                return False
        return True

    def trace(self) -> Trace:
        """All that is kept, launches still on their way included."""
        self.settle()
        now_us = self._clock()
        on_their_way = [_unfinished(ticket, now_us) for ticket in self._open.values()]
        spans = [*self._spans, *on_their_way]
        if self.predictor is not None:
            spans = predicted(spans, self.predictor)
        return Trace(
            self.num_sms,
            tuple(spans),
            tuple(self._choices),
            tuple(self._states),
            tuple(self._notes),
            self._dropped,
        )

    def save(self, path: str | Path) -> Path:
        """Write what is kept as a Chrome trace, which Perfetto opens; see `perfetto.save`."""
        from smkern.runtime.timeline.perfetto import save

        return save(self.trace(), as_path("path", path))

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what `save` wrote; see `perfetto.load`."""
        from smkern.runtime.timeline.perfetto import load

        return load(as_path("path", path))

    def _latest(self) -> float:
        return self._latest_us

    def _over(
        self, number: int, lane: Lane, place: Any, name: str, launched_us: float, seen_us: float,
        event: Any, launches: int, size: Any, about: Any,
    ) -> None:  # fmt: skip
        times = times_us(event)
        begin_us, end_us = times or (max(launched_us, self._ends[lane]), seen_us)
        self._add(
            Span(
                number, lane, place, name, launched_us, begin_us, max(begin_us, end_us), seen_us,
                times is not None, True, launches, size, about,
            )
        )  # fmt: skip

    def _add(self, span: Span) -> None:
        self._ends[span.lane] = span.end_us
        self._latest_us = max(self._latest_us, span.end_us, span.seen_us)
        is_full = len(self._spans) == self._spans.maxlen
        self._spans.append(span)
        if is_full:
            self._dropped += 1
            self._forget()
        for reader in self._readers:
            reader.span(span)

    def _forget(self) -> None:
        """Records from before the launches that are kept; the state that held then stays."""
        since_us = self._spans[0].launched_us if self._spans else 0.0
        for records in (self._choices, self._notes):
            while records and records[0].at_us < since_us:
                records.popleft()
        while len(self._states) > 1 and self._states[1].at_us <= since_us:
            self._states.popleft()

    def _decided(self, at_us: float, snapshot: Snapshot, decision: Decision) -> None:
        self._latest_us = max(self._latest_us, at_us)
        choice = Choice.of(at_us, snapshot, decision)
        self._choices.append(choice)
        for reader in self._readers:
            reader.choice(choice)
        waiting = snapshot.waiting
        batches = (snapshot.prefill, snapshot.preempted)
        prefilling = sum(len(batch.ids) for batch in batches if batch is not None)
        is_blocked = bool(waiting) and (
            waiting[0].pages > snapshot.free_pages or snapshot.batch >= snapshot.max_running
        )
        self._enter(
            State(
                snapshot.now_us, snapshot.batch, prefilling,
                len(waiting) + snapshot.more_waiting, is_blocked,
                decision.rung is not None or decision.shared,
            )
        )  # fmt: skip

    def _stated(self, at_us: float, decoding: int, prefilling: int, waiting: int) -> None:
        self._latest_us = max(self._latest_us, at_us)
        is_blocked = waiting > 0 and self.latest_state.is_blocked
        is_split = self.latest_state.is_split
        self._enter(State(at_us, decoding, prefilling, waiting, is_blocked, is_split))

    def _enter(self, state: State) -> None:
        if state[1:] == self.latest_state[1:]:
            return
        self.latest_state = state
        self._states.append(state)
        for reader in self._readers:
            reader.state(state)

    def _noted(self, at_us: float, name: str, about: dict[str, Any]) -> None:
        self._latest_us = max(self._latest_us, at_us)
        self._notes.append(Note(at_us, name, about))


class _Off(Timeline):
    """Records nothing."""

    is_off = True

    def _ignored(self, *record: Any, **more: Any) -> None:
        pass

    launched = over = later = later_each = decided = state = abandoned = _ignored

    def settle_briefly(self) -> bool:
        return True


def _unfinished(ticket: Ticket, now_us: float) -> Span:
    work, begin_us = ticket.work, ticket.launched_us
    return Span(
        ticket.number, ticket.lane, ticket.place, work.name, begin_us, begin_us,
        max(begin_us, now_us), now_us, False, False, work.launches, work.size, work.about,
    )  # fmt: skip
