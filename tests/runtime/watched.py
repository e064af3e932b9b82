"""An executor under watch: what its launches do to pages, in which order and where, is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from smkern.runtime.device import Event, Work
from smkern.runtime.executor import Draw, PrefillChunk, PrefillRun
from smkern.runtime.place import Lane, Place
from smkern.runtime.request import Request


@dataclass(slots=True, eq=False)
class Span:
    """Tokens of a request that a launch writes; it reads all before them."""

    request: Request
    start: int
    end: int
    is_known: bool
    """Whether the tokens are the prompt's, known to the host."""


@dataclass(slots=True, eq=False)
class Job:
    """A prepared launch: what it writes is said when it is launched."""

    kind: str
    chunks: tuple[PrefillChunk, ...] = ()
    requests: tuple[Request, ...] = ()
    run: PrefillRun | None = None
    first: int = 0
    count: int = 0


@dataclass(slots=True, eq=False)
class InFlight:
    """A launch and the pages that it reads and writes."""

    lane: Lane
    place: Place
    job: Job
    event: Event
    device: Any
    reads: dict[int, Request] = field(default_factory=dict)
    writes: dict[int, Request] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        # An error is told to who asks first, and that shall be the runtime.
        pending = getattr(self.event, "is_pending", None)
        if pending is None:
            return self.event.query()
        return not pending or self.device.lost_by is not None


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a page holds where the token was drawn by the device: known later."""

    request: Request
    position: int


class WatchedDevice:
    """A device whose launches are told to the watch; else as it is."""

    def __init__(self, device: Any, watch: WatchedExecutor) -> None:
        self._device = device
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, lane: Lane, place: Place, work: Work) -> Event:
        if work.name == "fence":  # the loop's own: it runs nothing
            return self._device.launch(lane, place, work)
        with self._watch.kept():
            flight = self._watch.before(lane, place, work)
        event: Event = self._device.launch(lane, place, work)
        with self._watch.kept():
            self._watch.after(flight, event)
        return event


class WatchedExecutor:
    """An executor whose calls and launches are checked against notes of its own.

    What is checked at a launch: its lane and place; that no other lane's work holds its SMs (unless
    `impatient`); that the layers of a batch come in order, one batch a slot; that a request has
    pages for what is written; that it goes on where it was; that each page which is read holds the
    request's own tokens, by launches that are over or in front of it on the lane; that no page is
    written which the other lane still reads or writes; and that the host knows the last token of a
    request that comes to decode from anywhere but the launch before.

    Args:
        executor: Simulated or not.
        impatient: Whether the growing side may overlap.
        shares: Whether any sides may now, but for those of mixed forwards.
    """

    def __init__(
        self, executor: Any, *, impatient: bool = False, shares: Callable[[], bool] = lambda: False
    ) -> None:
        self._executor = executor
        self._shares = shares
        self._impatient = impatient
        self.device = WatchedDevice(executor.device, self)
        self.violations: list[str] = []
        """What was found, since a loop may take it for an error of the model."""
        self.in_flight: list[InFlight] = []
        self.launched: list[str] = []
        """Kind of every launch."""
        self.wasted = 0
        """Rows of decode steps whose request could hold no more."""
        self._computed: dict[tuple[Request, int], int] = {}
        self._seated: set[Request] = set()
        """Whose next token the decode lane's last launch leaves on the device."""
        self._jobs: dict[int, tuple[Work, Job, int]] = {}
        self._prepared = 0
        self._last = -1
        self._layers: dict[int, tuple[PrefillRun, int]] = {}
        self._contents: dict[tuple[int, int], int | Drawn] = {}
        self._writers: dict[int, InFlight] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is found in here."""
        try:
            yield
        except AssertionError as error:
            self.violations.append(str(error).split("\n")[0])
            raise

    # The executor's protocol.

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        with self.kept():
            held = self._layers.get(slot)
            assert held is None, f"slot {slot} holds {held and held[0].chunks}"
            assert chunks, "a batch of no prompts"
            self._check_chunks(chunks)
        run: PrefillRun = self._executor.begin(chunks, slot)
        self._layers[slot] = (run, 0)
        return run

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        work = self._executor.prefill(run, first, count)
        return self._prepare(work, Job("prefill", tuple(run.chunks), (), run, first, count))

    def decode(self, requests: Sequence[Request], steps: int) -> list[tuple[Work, Draw]]:
        with self.kept():
            assert requests, "a decode step of no requests"
            assert steps >= 1
            self._check_rows(requests)
        found = self._executor.decode(requests, steps)
        with self.kept():
            assert len(found) == steps
            for _, draw in found:
                assert set(draw.requests) == set(requests)
        job = Job("decode", (), tuple(requests))
        return [(self._prepare(work, replace_job(job)), draw) for work, draw in found]

    def mixed(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[Request]
    ) -> tuple[Work, Draw]:
        with self.kept():
            assert not {chunk.request for chunk in chunks} & set(requests), "in a forward twice"
            self._check_chunks(chunks)
            self._check_rows(requests)
        work, draw = self._executor.mixed(chunks, requests)
        drawn = [chunk.request for chunk in chunks if chunk.draws]
        with self.kept():
            assert list(draw.requests[: len(drawn)]) == drawn
            assert set(draw.requests[len(drawn) :]) == set(requests)
        return self._prepare(work, Job("mixed", tuple(chunks), tuple(requests))), draw

    def forget(self, request: Request) -> None:
        self._executor.forget(request)
        for slot, (run, _) in list(self._layers.items()):
            if any(chunk.request is request for chunk in run.chunks):
                del self._layers[slot]
        self._seated.discard(request)

    # What is launched.

    def before(self, lane: Lane, place: Place, work: Work) -> InFlight:
        """Check a launch that is about to be made."""
        known = self._jobs.pop(id(work), None)
        assert known is not None, f"{work.name!r} was not made by the executor, or came twice"
        _, job, number = known
        assert number > self._last, f"{job.kind} is launched behind work that was made later"
        self._last = number
        flight = InFlight(lane, place, job, NEVER, self.device)
        self._check_place(flight)
        self.in_flight = [other for other in self.in_flight if not other.is_over]
        for span in self._spans(job):
            self._check_span(flight, span)
        return flight

    def after(self, flight: InFlight, event: Event) -> None:
        """Enter a launch that was made."""
        flight.event = event
        job = flight.job
        for span in self._spans(job):
            self._enter(flight, span)
        if job.run is not None:
            slot, done = job.run.slot, job.first + job.count
            if done == self.config.num_layers:
                del self._layers[slot]
            else:
                self._layers[slot] = (job.run, done)
        if flight.lane == "decode":
            self._seated = {*job.requests, *(x.request for x in job.chunks if x.draws)}
        self.in_flight.append(flight)
        self.launched.append(job.kind)

    @property
    def batches(self) -> list[tuple[PrefillRun, int]]:
        """Batches of prompts with layers to go, and their layers launched."""
        return list(self._layers.values())

    @property
    def num_in_flight(self) -> int:
        """Launches that are not over."""
        self.in_flight = [flight for flight in self.in_flight if not flight.is_over]
        return len(self.in_flight)

    def computed(self, request: Request) -> int:
        """Tokens whose keys launches have written, or found in the pool."""
        life = request, request.num_preemptions
        if life not in self._computed:
            return int(self.pool.held(request).cached_tokens)
        return self._computed[life]

    def _prepare(self, work: Work, job: Job) -> Work:
        made = replace(work)
        self._jobs[id(made)] = (made, job, self._prepared)
        self._prepared += 1
        return made

    def _check_rows(self, requests: Sequence[Request]) -> None:
        assert len(set(requests)) == len(requests), "a request decodes in two rows"
        assert len(requests) <= self.max_running, f"{len(requests)} rows"

    def _check_chunks(self, chunks: Sequence[PrefillChunk]) -> None:
        assert len({chunk.request for chunk in chunks}) == len(chunks), "a prompt twice"
        assert len(chunks) <= self.max_prefill, f"{len(chunks)} prompts"
        tokens = sum(chunk.count for chunk in chunks)
        assert tokens <= self.max_tokens, f"{tokens} tokens"
        for chunk in chunks:
            self._check_chunk(chunk)

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        request = chunk.request
        assert chunk.count >= 1
        assert chunk.start == self.computed(request), (
            f"{request!r} goes on at {chunk.start}, {self.computed(request)} tokens are computed"
        )
        end = chunk.start + chunk.count
        assert end <= len(request.ids)
        assert chunk.draws == (end == len(request.ids)), f"{request!r} draws at {end}"

    def _check_place(self, flight: InFlight) -> None:
        lane, place, job = flight.lane, flight.place, flight.job
        assert lane == ("prefill" if job.kind == "prefill" else "decode"), f"{job.kind} on {lane}"
        assert place == Place.of(lane, place.rung or None, self.device.num_sms)
        if job.kind == "mixed":
            assert place.side == "whole", f"a mixed forward on {place}"
        for other in self.in_flight:
            if other.lane != lane and not other.is_over and place.overlaps(other.place):
                whole = "whole" in (place.side, other.place.side)
                mixes = "mixed" in (job.kind, other.job.kind)
                may = (self._impatient and not whole) or (self._shares() and not mixes)
                assert may, f"{place} beside {other.place}"
        if job.run is not None:
            held = self._layers.get(job.run.slot)
            assert held is not None, f"layers of a batch that slot {job.run.slot} does not hold"
            assert held == (job.run, job.first), f"layer {job.first} comes behind layer {held[1]}"
            assert job.count >= 1
            assert job.first + job.count <= self.config.num_layers

    def _spans(self, job: Job) -> list[Span]:
        spans = [Span(x.request, x.start, x.start + x.count, True) for x in job.chunks]
        for request in job.requests:
            start = self.computed(request)
            end = min(start + 1, request.max_tokens_held)
            spans.append(Span(request, start, max(start, end), False))
        return spans

    def _check_span(self, flight: InFlight, span: Span) -> None:
        request, size = span.request, self.pool.page_size
        pages = self.pool.pages(request)
        assert len(pages) * size >= span.end, (
            f"{request!r} writes tokens to {span.end} in {len(pages)} pages of {size}"
        )
        if not span.is_known:
            assert span.start >= len(request.ids) - 1, (
                f"{request!r} has {len(request.ids)} tokens, {span.start} computed: decoding skips"
            )
            assert request in self._seated or len(request.ids) - 1 == span.start, (
                f"{request!r} comes back with {len(request.ids)} tokens, and {span.start + 1} are "
                "drawn: the host does not know its last one"
            )
        chain = self._chain(request, min(span.start, len(request.ids)))
        for position in range(span.start):
            held = self._contents.get((pages[position // size], position % size))
            self._check_held(request, position, held, chain)
        reads = set(pages[: -(-span.end // size)])
        writes = set(pages[span.start // size : -(-span.end // size)])
        for page in reads:
            writer = self._writers.get(page)
            assert writer is None or writer.lane == flight.lane or writer.is_over, (
                f"{flight.job.kind} of {request!r} reads page {page}, which {writer.job.kind} on "
                "the other lane still writes"
            )
        for other in self.in_flight:
            if other.lane != flight.lane and not other.is_over:
                shared = writes & (set(other.reads) | set(other.writes))
                assert not shared, (
                    f"{flight.job.kind} of {request!r} writes pages {shared}, which "
                    f"{other.job.kind} on the other lane still uses"
                )
        flight.reads.update(dict.fromkeys(reads, request))
        for page in writes:
            owner = flight.writes.setdefault(page, request)
            assert owner is request, f"{owner!r} and {request!r} write page {page}"

    def _check_held(
        self, request: Request, position: int, held: int | Drawn | None, chain: list[int]
    ) -> None:
        where = f"{request!r} at {position}"
        assert held is not None, f"{where} reads what nobody wrote"
        if isinstance(held, Drawn):
            if held.request is request:
                assert held.position == position, where
                return
            known = self._chain(held.request, len(held.request.ids))
            assert held.position < len(known), f"{where} reads a token that was never delivered"
            held = known[held.position]
        assert position < len(chain), f"{where} reads more than it has"
        assert held == chain[position], f"{where} reads another text's keys"

    def _enter(self, flight: InFlight, span: Span) -> None:
        request, size = span.request, self.pool.page_size
        pages = self.pool.pages(request)
        if not span.is_known and span.end == span.start:
            self.wasted += 1
        chain = self._chain(request, span.end) if span.is_known else []
        for position in range(span.start, span.end):
            place = (pages[position // size], position % size)
            held = chain[position] if span.is_known else Drawn(request, position)
            self._contents[place] = held
            self._writers[place[0]] = flight
        job = flight.job
        last = job.run is None or job.first + job.count == self.config.num_layers
        if last:
            self._computed[request, request.num_preemptions] = span.end

    def _chain(self, request: Request, count: int) -> list[int]:
        """A name for each token of a request and all before it."""
        names: list[int] = []
        for token in request.ids[:count]:
            names.append(hash((names[-1] if names else None, token)))
        return names


class _Never:
    """The event of a launch that was not made yet."""

    def query(self) -> bool:
        return False

    def times_us(self) -> tuple[float, float] | None:
        return None


NEVER = _Never()


def replace_job(job: Job) -> Job:
    """A job of its own for each step."""
    return Job(job.kind, job.chunks, job.requests)
