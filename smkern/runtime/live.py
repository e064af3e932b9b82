"""A request inside the runtime, and what its owner holds of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from weakref import WeakMethod

from smkern.errors import SmkernError
from smkern.kv import Event as KvEvent
from smkern.policies import Waiting
from smkern.runtime.request import Completion, Request

Stage = Literal["future", "waiting", "prefill", "running", "paused", "done"]


class Output(NamedTuple):
    """One token of a request, or its end.

    Attributes:
        id: Of the request, as its handle has it.
        token: That was drawn; None where the request failed. One that is cancelled puts out
            nothing more.
        text: That became certain by it, maybe none yet. None without a tokenizer.
        completion: All of it, once it is finished.
        error: Why it failed.
    """

    id: int
    token: int | None
    text: str | None = None
    completion: Completion | None = None
    error: SmkernError | None = None


@dataclass(slots=True, eq=False)
class Live:
    """A request on its way through the runtime.

    Attributes:
        request: Its tokens and how they are drawn.
        priority: Higher goes first.
        arrival_us: When it came.
        deadline_us: When its first token is wanted.
        stage: Where it is.
        computed: Tokens whose keys and values are in its pages once what is launched is over.
        ahead: Tokens that launches have drawn or will draw, and that were not delivered yet.
        room: Tokens that its pages hold; 0: it holds none.
        epoch: Counts its preemptions: what was launched before draws nothing for it.
        last: The end of the last launch that reads or writes its pages.
        again: Tokens that it drew before it began anew, and must draw again.
        token_us: When its last token was delivered.
        is_cancelled: Whether its owner wants no more of it.
        error: Why it failed.
        completion: What it became.
    """

    request: Request
    priority: int
    arrival_us: float
    deadline_us: float
    stage: Stage = "waiting"
    computed: int = 0
    ahead: int = 0
    room: int = 0
    epoch: int = 0
    last: KvEvent | None = None
    again: list[int] = field(default_factory=list)
    token_us: float = 0.0
    is_cancelled: bool = False
    error: SmkernError | None = None
    completion: Completion | None = None
    _view: Waiting | None = None

    @property
    def id(self) -> int:
        return self.request.index

    @property
    def rank(self) -> tuple[int, float, int]:
        """Who is served first, and preempted last: high priority, then early arrival."""
        return (-self.priority, self.arrival_us, self.request.index)

    def forget_view(self) -> None:
        """What a policy sees of it has changed."""
        self._view = None

    def view(self, pages: Callable[[int], int]) -> Waiting:
        """What a policy sees of it while it waits; kept until something changes."""
        if self._view is None:
            tokens = len(self.request.ids) - self.computed
            wanted = 0 if self.room else pages(len(self.request.ids))
            self._view = Waiting(
                self.id, self.arrival_us, tokens, self.computed, self.priority,
                self.deadline_us, wanted,
            )  # fmt: skip
        return self._view


class Handle:
    """A submitted request, for its owner.

    Attributes:
        id: Its number, from 0 in the order of submissions.
    """

    __slots__ = ("_cancel", "_live", "id")

    def __init__(self, live: Live, cancel: Callable[[int], None]) -> None:
        self._live = live
        # Who keeps handles for their tokens keeps no model and no pages by them.
        self._cancel = WeakMethod(cancel)
        self.id = live.id

    def __repr__(self) -> str:
        return f"Handle({self.id}, {self._live.stage}, {len(self.tokens)} tokens)"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens delivered so far."""
        request = self._live.request
        return (*request.ids[request.prompt_len :], *self._live.again)

    @property
    def done(self) -> bool:
        """Whether no more tokens come."""
        return self._live.stage == "done"

    @property
    def completion(self) -> Completion | None:
        """What it became; None until it is finished, and where it failed or was cancelled."""
        return self._live.completion

    @property
    def error(self) -> SmkernError | None:
        """Why it failed."""
        return self._live.error

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._live.is_cancelled

    def is_of(self, cancel: Callable[[int], None]) -> bool:
        """Whether this is what cancels it: its own runtime's."""
        return self._cancel() == cancel

    def cancel(self) -> None:
        """Want no more tokens of it; its pages come back once nothing reads them."""
        cancel = self._cancel()
        if cancel is not None:
            cancel(self.id)


def rows_of(lives: Iterable[Live], requests: Iterable[Request]) -> list[tuple[Live, int]]:
    """Who a launch draws for and their epochs, by row, from the requests by row."""
    by_request = {live.request: live for live in lives}
    return [(by_request[request], by_request[request].epoch) for request in requests]
