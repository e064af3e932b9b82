"""What the owner of a request holds of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakMethod

from smkern.errors import SmkernError
from smkern.runtime.request import Completion, Request


class Output(NamedTuple):
    """One token of a request, or its end; ends come behind the other tokens of a step.

    Attributes:
        id: The request's number, as its handle has it.
        token: The token that was drawn; None where the request failed. One that is cancelled puts
            out nothing more.
        text: Text that became certain by it, maybe none yet. None without a tokenizer.
        completion: All of it, once it is finished.
        error: Why it failed.
    """

    id: int
    token: int | None
    text: str | None = None
    completion: Completion | None = None
    error: SmkernError | None = None


class Handle:
    """A submitted request, for its owner.

    Attributes:
        id: Its number, from 0 in the order of submissions.
    """

    __slots__ = ("_cancel", "_request", "id")

    def __init__(self, request: Request, cancel: Callable[[int], None]) -> None:
        self._request = request
        # A handle that is kept for its tokens keeps no model and no pages alive.
        self._cancel = WeakMethod(cancel)
        self.id = request.index

    def __repr__(self) -> str:
        return f"Handle({self.id}, {self._request.stage}, {len(self.tokens)} tokens)"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens delivered so far."""
        request = self._request
        return (*request.ids[request.prompt_len :], *request.to_repeat)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of its prompt that were in the pool when it came; None until it has pages."""
        return self._request.cached_tokens

    @property
    def done(self) -> bool:
        """Whether no more tokens come."""
        return self._request.stage == "done" or self._request.completion is not None

    @property
    def completion(self) -> Completion | None:
        """What it became; None until it is finished, and where it failed or was cancelled."""
        return self._request.completion

    @property
    def error(self) -> SmkernError | None:
        """Why it failed."""
        return self._request.error

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._request.is_cancelled

    def is_of(self, cancel: Callable[[int], None]) -> bool:
        """Whether this is what cancels it: its own runtime's."""
        return self._cancel() == cancel

    def cancel(self) -> None:
        """Want no more tokens of it; its pages come back once nothing reads them."""
        cancel = self._cancel()
        if cancel is not None:
            cancel(self.id)
