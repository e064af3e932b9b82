"""What a timeline holds, as plain data: launches, decisions, what there was to do, notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from smkern.errors import SmkernError
from smkern.latency import Size
from smkern.policies.decision import Decision
from smkern.policies.snapshot import Snapshot
from smkern.runtime.place import LANES, Lane, Place

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor


SHARED_US = 5.0
"""Launches of two lanes that overlap by more than a clock's error share the device."""


class Span(NamedTuple):
    """A launch on its lane.

    Attributes:
        number: Number of the launch, in their order.
        lane: "decode" or "prefill".
        place: The SMs that it might use.
        name: What the work was called.
        launched_us: When the host launched it.
        begin_us, end_us: When the device began and ended it.
        seen_us: When the host saw it over; `end_us` of one that is not over is the clock then.
        is_exact: Whether the device said when it began and ended. Otherwise it began when it was
            launched or when the one before it ended, and ended when the host saw it.
        is_over: False: it was still on its way, or was abandoned after an error.
        launches: Kernels of it; a graph is one.
        size: What it was made of, where it said so.
        about: What else was said of it.
        predicted_us: How long it should have taken, where a predictor was there.
    """

    number: int
    lane: Lane
    place: Place
    name: str
    launched_us: float
    begin_us: float
    end_us: float
    seen_us: float
    is_exact: bool = True
    is_over: bool = True
    launches: int = 1
    size: Size | None = None
    about: dict[str, Any] | None = None
    predicted_us: float | None = None

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


class State(NamedTuple):
    """What there is to do, from a moment on.

    Attributes:
        at_us: The moment.
        decoding: Requests that decode.
        prefilling: Requests whose prompts are on their way through the layers.
        waiting: Requests that wait for that.
        is_blocked: Whether none of those could begin: no pages, or no row.
        is_split: Whether both sides may run at once.
    """

    at_us: float = 0.0
    decoding: int = 0
    prefilling: int = 0
    waiting: int = 0
    is_blocked: bool = False
    is_split: bool = False

    def has_work(self, lane: Lane) -> bool:
        """Whether a lane has something to do.

        The prefill lane: prompts on their way, or, in a split, prompts that could begin. The decode
        lane: requests that decode, or, where both share the device, prompts that could begin.
        """
        could_begin = self.waiting > 0 and not self.is_blocked
        if lane == "prefill":
            return self.prefilling > 0 or (self.is_split and could_begin)
        return self.decoding > 0 or (could_begin and not self.is_split and self.prefilling == 0)


class Choice(NamedTuple):
    """A policy's decision, with what of the snapshot explains it.

    Attributes:
        at_us: When it was made.
        trigger: Why the policy was asked.
        rung, prefill, chunk_tokens, layers, steps, join, preempt, pause_decode: The decision's.
        decoding, waiting, decode_queued, prefill_queued, free_pages: The snapshot's, the first two
            as counts.
        prefill_rung, shared, ask_again_us, reason: The decision's.
    """

    at_us: float
    trigger: str
    rung: int | None
    prefill: tuple[int, ...]
    chunk_tokens: int | None
    layers: int
    steps: int
    join: str
    preempt: bool
    pause_decode: bool
    decoding: int
    waiting: int
    decode_queued: int
    prefill_queued: int
    free_pages: int
    prefill_rung: int | str | None = "same"
    shared: bool = False
    ask_again_us: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, at_us: float, snapshot: Snapshot, decision: Decision) -> Choice:
        return cls(
            at_us,
            snapshot.trigger,
            decision.rung,
            tuple(decision.prefill),
            decision.chunk_tokens,
            decision.layers,
            decision.steps,
            decision.join,
            decision.preempt,
            decision.pause_decode,
            snapshot.batch,
            len(snapshot.waiting) + snapshot.more_waiting,
            snapshot.decode_queued,
            snapshot.prefill_queued,
            snapshot.free_pages,
            decision.prefill_rung,
            decision.shared,
            decision.ask_again_us,
            decision.reason,
        )


class Note(NamedTuple):
    """Something else that happened: an error, a preemption, a switch of the mode."""

    at_us: float
    name: str
    about: dict[str, Any]


class Reader:
    """Told what a timeline put in order, each record once, as they were recorded."""

    def span(self, span: Span) -> object:
        """A launch that is over, or was abandoned."""

    def state(self, state: State) -> None:
        """What there is to do has changed."""

    def choice(self, choice: Choice) -> None:
        """A decision."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A stretch of a timeline.

    Attributes:
        num_sms: SMs of the device.
        spans: Launches, in the order in which the host saw them over; those still on their way
            come last.
        choices: Decisions in their order.
        states: What there was to do, in order.
        notes: In order.
        dropped: Launches that were forgotten because the timeline was full.
    """

    num_sms: int
    spans: tuple[Span, ...] = ()
    choices: tuple[Choice, ...] = ()
    states: tuple[State, ...] = ()
    notes: tuple[Note, ...] = ()
    dropped: int = 0

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        """A lane's launches, in order."""
        return tuple(sorted(span for span in self.spans if span.lane == lane))

    @property
    def window_us(self) -> tuple[float, float]:
        """From the first begin to the last end of a launch; (0, 0) where there is none."""
        if not self.spans:
            return 0.0, 0.0
        return min(s.begin_us for s in self.spans), max(s.end_us for s in self.spans)

    @property
    def extent_us(self) -> tuple[float, float]:
        """The first and the last time of anything; (0, 0) where there is nothing."""
        times = [t for s in self.spans for t in (s.launched_us, s.begin_us, s.end_us)]
        for part in (self.choices, self.states, self.notes):
            times += [record.at_us for record in part]
        return min(times, default=0.0), max(times, default=0.0)

    def split(self) -> tuple[tuple[float, int, int], ...]:
        """Moments at which the lanes' SMs changed: when, the decode side's, the prefill side's.

        A lane on the whole device leaves the other none, unless that shares it. What is on its way
        may not have begun.
        """
        changes: list[tuple[float, int, int]] = []
        sms: dict[Lane, int] = dict.fromkeys(LANES, 0)
        ends: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        ran = (span for span in self.spans if span.is_over)
        for span in sorted(ran, key=lambda span: (span.begin_us, span.number)):
            before = dict(sms)
            other: Lane = "prefill" if span.lane == "decode" else "decode"
            sms[span.lane], ends[span.lane] = span.place.num_sms, span.end_us
            if ends[other] <= span.begin_us + SHARED_US:
                if span.place.side == "whole":
                    sms[other] = 0
                elif not 0 < sms[other] <= self.num_sms - span.place.num_sms:
                    sms[other] = self.num_sms - span.place.num_sms
            if sms != before:
                changes.append((span.begin_us, sms["decode"], sms["prefill"]))
        return tuple(changes)


def predicted(spans: Iterable[Span], predictor: Predictor) -> list[Span]:
    """The same launches with a predicted time each, where they say what they are made of.

    A launch is priced beside what ran on the other lane when it began.
    """
    spans = list(spans)
    lanes = {lane: sorted(span for span in spans if span.lane == lane) for lane in LANES}
    next_of = dict.fromkeys(LANES, 0)
    priced = {}
    for span in sorted(spans, key=lambda span: (span.begin_us, span.number)):
        other: Lane = "prefill" if span.lane == "decode" else "decode"
        queue, index = lanes[other], next_of[other]
        while index < len(queue) and queue[index].end_us <= span.begin_us:
            index += 1
        next_of[other] = index
        beside = queue[index] if index < len(queue) else None
        if beside is not None and beside.begin_us > span.begin_us:
            beside = None
        priced[span.number] = span._replace(predicted_us=_price(span, beside, predictor))
    return [priced[span.number] for span in spans]


def _price(span: Span, beside: Span | None, predictor: Predictor) -> float | None:
    if span.size is None:
        return None
    num_sms = span.place.num_sms
    try:
        alone_us = predictor.alone_us(span.size, num_sms)
        if beside is None or beside.size is None:
            return alone_us
        return alone_us * predictor.slowdown(span.size, num_sms, beside.size, beside.place.num_sms)
    except SmkernError:
        return None  # a size that the predictor does not serve
