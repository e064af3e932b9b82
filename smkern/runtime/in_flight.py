"""What is known of launches on their way, and of those that raised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from smkern.errors import DeviceError, ModelError
from smkern.policies import PrefillView
from smkern.runtime.device import Event, is_over
from smkern.runtime.executor import Draw, PrefillRun
from smkern.runtime.request import Request
from smkern.runtime.steady_batch import SteadyBatch
from smkern.runtime.ticket import Ticket


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """A batch of prompts whose layers are launched in groups."""

    run: PrefillRun
    requests: list[Request]
    started_us: float
    layers: int = 0
    _view: PrefillView | None = None

    def view(self) -> PrefillView:
        """What a policy sees of it; kept until layers are launched."""
        view = self._view
        if view is None:
            view = self._view = PrefillView(
                ids=tuple(request.index for request in self.requests),
                chunks=tuple((chunk.count, chunk.start) for chunk in self.run.chunks),
                layers_launched=self.layers,
                started_us=self.started_us,
                priority=max(request.priority for request in self.requests),
                deadline_us=min(request.deadline_us for request in self.requests),
            )
        elif view.layers_launched != self.layers:
            view = self._view = replace(view, layers_launched=self.layers)
        return view


@dataclass(slots=True, eq=False)
class InFlight:
    """What is known of a launch until it is over.

    Attributes:
        requests: Requests whose pages it reads or writes.
        draw: The tokens that it draws.
        preemptions: How often each request of `draw` had begun anew when it was launched.
        batch: The batch whose last layers it runs.
        steady: The batch that it draws for, where that is a step like the one before.
        number: Its number among the steady batch's steps.
    """

    requests: Sequence[Request]
    draw: Draw | None = None
    preemptions: Sequence[int] = ()
    batch: PrefillBatch | None = None
    steady: SteadyBatch | None = None
    number: int = 0


def preemptions_of(requests: Iterable[Request]) -> list[int]:
    """How often each of these began anew."""
    return [request.num_preemptions for request in requests]


@dataclass(frozen=True, slots=True, eq=False)
class AllOver:
    """The end of several launches."""

    events: tuple[Event, ...]

    def query(self) -> bool:
        """Whether all are over. One that failed is, with all in front of it; others may not."""
        return all(_is_over(event) for event in self.events)


def _is_over(event: Event) -> bool:
    try:
        return is_over(event)
    except DeviceError:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Says when what a launch writes may be read: never, if it failed."""

    ticket: Ticket

    def query(self) -> bool:
        return self.ticket.query() and self.ticket.error is None


class LaunchError(ModelError):
    """A launch raised, or the read of its tokens.

    Attributes:
        requests: Those that have failed by it.
        beside: Those that go on, for which it may have drawn all the same.
    """

    def __init__(
        self, requests: Iterable[Request], reason: Exception, when: str = "work was launched"
    ) -> None:
        super().__init__(f"{type(reason).__name__} while {when}: {reason}")
        self.requests = list(requests)
        self.beside: list[Request] = []
