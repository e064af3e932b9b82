"""Every call that a runtime makes of what it is given, counted, and one of them made to fail.

Call sites are found by a run in which nothing fails: whatever the runtime calls, reads as a
property or is answered is behind a `Stand`, so that a new call is a new site by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from smkern.runtime.device import Work
from smkern.runtime.executor import Draw

KINDS = ("raise", "raise behind", "hang", "too few", "too many", "wrong type", "late")
"""What a call may do wrong: it raises, before it does anything or behind that; it does not come
back, so that somebody interrupts it (an event: it is never over); it answers with less or more than
was asked for, or with what is no answer; it takes a second."""
LATE_US = 1e6


class PlantedError(Exception):
    """Not one of the project's."""


class Nothing:
    """No answer to anything."""

    def __repr__(self) -> str:
        return "Nothing()"


@dataclass(frozen=True, slots=True)
class Fault:
    """The `turn`th call of a site, from 1, goes wrong."""

    site: str
    turn: int
    kind: str


class Calls:
    """Counts calls by site, and lets one go wrong.

    Args:
        fault: Which; None: none.
        spend: Lets time go by, us.
    """

    def __init__(self, fault: Fault | None, spend: Callable[[float], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.fault = fault
        self.has_failed = False
        self.is_armed = False
        self._spend = spend

    def __call__(
        self, site: str, function: Callable[..., Any], /, *given: Any, **named: Any
    ) -> Any:
        if not self.is_armed:
            return function(*given, **named)
        self.counts[site] += 1
        fault = self.fault
        if fault is None or (fault.site, fault.turn) != (site, self.counts[site]):
            return function(*given, **named)
        self.has_failed = True
        return self._fail(fault, function, *given, **named)

    def _fail(
        self, fault: Fault, function: Callable[..., Any], /, *given: Any, **named: Any
    ) -> Any:
        kind = fault.kind
        if kind == "raise":
            raise PlantedError("planted")
        if kind == "late":
            self._spend(LATE_US)
        answer = function(*given, **named)
        if kind == "raise behind":
            raise PlantedError("planted")
        if kind == "hang":
            raise KeyboardInterrupt
        if kind == "wrong type":
            return Nothing()
        if kind in ("too few", "too many"):
            return _miscounted(answer, 1 if kind == "too many" else -1)
        return answer


def _miscounted(answer: Any, by: int) -> Any:
    """One more or less of what can be counted."""
    if isinstance(answer, (list, tuple, str)) and type(answer) in (list, tuple, str):
        return (answer + answer[-1:]) if by > 0 else answer[:-1]
    if type(answer) is int:
        return answer + by
    return answer


class Stand:
    """Stands in front of a thing: as it is, but every call and property of it is a site.

    Args:
        thing: What is behind.
        role: What it is called in sites.
        calls: Told of every call.
        answers: By name, what becomes of an answer.
    """

    def __init__(
        self,
        thing: Any,
        role: str,
        calls: Calls,
        answers: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._thing = thing
        self._role = role
        self._calls = calls
        self._answers = answers or {}

    def __repr__(self) -> str:
        return f"{self._role} of {self._thing!r}"

    def __getattr__(self, name: str) -> Any:
        site = f"{self._role}.{name}"
        if isinstance(getattr(type(self._thing), name, None), property):
            return self._calls(site, getattr, self._thing, name)
        value = getattr(self._thing, name)
        if not callable(value):
            return value
        answered = self._answers.get(name)
        if answered is not None:
            value = partial(_answered, value, answered)
        return partial(self._calls, site, value)


def _answered(call: Callable[..., Any], then: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return then(call(*given, **named), *given)


class EventStand(Stand):
    """An event; one that hangs is never over."""

    _hangs = False

    def query(self) -> Any:
        fault, calls = self._calls.fault, self._calls
        is_here = fault is not None and fault.kind == "hang" and fault.site == "event.query"
        if is_here and calls.is_armed and calls.counts["event.query"] + 1 == fault.turn:  # type: ignore[union-attr]
            calls.counts["event.query"] += 1
            self._hangs = calls.has_failed = True
        return False if self._hangs else self._calls("event.query", self._thing.query)


def stand_in(device: Any, calls: Calls) -> Stand:
    """A device whose calls, and those of its events, are sites."""

    def bare(events: Any) -> list[Any]:
        return [x._thing if isinstance(x, EventStand) else x for x in events]

    stand = Stand(
        device, "device", calls,
        {"launch": lambda event, *given: EventStand(event, "event", calls)},
    )  # fmt: skip
    stand.wait = partial(  # type: ignore[attr-defined]
        calls, "device.wait",
        lambda events, until_us=None: device.wait(
            bare([x for x in events if not getattr(x, "_hangs", False)]),
            # what hangs takes time, too
            device.now_us() + 1e3 if until_us is None and any(
                getattr(x, "_hangs", False) for x in events
            ) else until_us,
        ),
    )  # fmt: skip
    return stand


def stand_of(executor: Any, device: Stand, calls: Calls) -> Stand:
    """An executor whose calls, and those of all that it answers with, are sites."""

    def work_of(work: Work) -> Work:
        left = work.left
        if left is not None:
            left = partial(calls, "work.left", lambda event, plain=left: plain(event._thing))
        return replace(work, run=partial(calls, "work.run", work.run), left=left)

    def draw_of(draw: Draw) -> Draw:
        if not isinstance(draw.read, partial):
            draw.read = partial(calls, "draw.read", draw.read)
        return draw

    def pair_of(pair: tuple[Work, Draw], *given: Any) -> tuple[Work, Draw]:
        return work_of(pair[0]), draw_of(pair[1])

    def layers_of(work: Work, run: Any, *given: Any) -> Work:
        if run.draw is not None:
            draw_of(run.draw)
        return work_of(work)

    stand = Stand(
        executor, "executor", calls,
        {
            "decode": lambda works, *given: [pair_of(pair) for pair in works],
            "mixed": pair_of,
            "prefill": layers_of,
        },
    )  # fmt: skip
    stand.device = device  # type: ignore[attr-defined]
    stand.pool = Stand(executor.pool, "pool", calls)  # type: ignore[attr-defined]
    return stand
