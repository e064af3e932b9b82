"""What is known of launches on their way, and of those that raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from smkern.errors import DeviceError, ModelError
from smkern.policies import PrefillView
from smkern.runtime.device import Event
from smkern.runtime.executor import Draw, PrefillRun
from smkern.runtime.interleaver import Ticket
from smkern.runtime.live import Live
from smkern.runtime.steady_batch import SteadyBatch


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """A batch of prompts whose layers are launched in groups."""

    run: PrefillRun
    lives: list[Live]
    started_us: float
    layers: int = 0
    _view: PrefillView | None = None

    def view(self) -> PrefillView:
        """What a policy sees of it; kept until layers are launched."""
        view = self._view
        if view is None:
            view = self._view = PrefillView(
                ids=tuple(live.id for live in self.lives),
                chunks=tuple((chunk.count, chunk.start) for chunk in self.run.chunks),
                layers_launched=self.layers,
                started_us=self.started_us,
                priority=max(live.priority for live in self.lives),
                deadline_us=min(live.deadline_us for live in self.lives),
            )
        elif view.layers_launched != self.layers:
            view = self._view = replace(view, layers_launched=self.layers)
        return view


@dataclass(slots=True, eq=False)
class InFlight:
    """What is known of a launch until it is over.

    Attributes:
        lives: Requests whose pages it reads or writes.
        rows: A request and its epoch for each token that it draws.
        draw: Reads the tokens.
        batch: The batch whose last layers it runs.
        steady: For whom it draws, where that is a step like the one before.
        number: Of the steady batch's steps.
    """

    lives: Sequence[Live]
    rows: list[tuple[Live, int]] = field(default_factory=list)
    draw: Draw | None = None
    batch: PrefillBatch | None = None
    steady: SteadyBatch | None = None
    number: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Both:
    """The end of two."""

    one: Event
    two: Event

    def query(self) -> bool:
        """Whether both are over. One that failed is, with all in front of it; the other may not."""
        return all(_is_over(event) for event in (self.one, self.two))


def _is_over(event: Event) -> bool:
    try:
        return event.query()
    except DeviceError:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Says when what a launch writes may be read: never, if it failed."""

    ticket: Ticket

    def query(self) -> bool:
        return self.ticket.query() and self.ticket.error is None


class Blame:
    """What a model raises becomes a `ModelError` that knows the requests of the launch."""

    def __init__(self, lives: Sequence[Live]) -> None:
        self._lives = lives

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, LaunchError):
            raise LaunchError(list(self._lives), error) from error


class LaunchError(ModelError):
    """A launch raised; `lives` are the requests that have failed by it."""

    def __init__(self, lives: list[Live], reason: Exception) -> None:
        super().__init__(f"{type(reason).__name__} while work was launched: {reason}")
        self.lives = lives
