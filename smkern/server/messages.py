"""What the HTTP server and the engine's process say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.models.sampling import SamplingParams

if TYPE_CHECKING:  # the HTTP process needs no runtime
    from smkern.runtime.request import FinishReason


@dataclass(frozen=True, slots=True)
class Submit:
    """Serve a prompt; answered by `Accepted` or `Refused`.

    Attributes:
        id: A number of the server's own.
        prompt: Its token ids.
        params: How to draw; no stop texts, which the server looks for.
        priority, deadline_ms: As `Multiplexer.submit` takes them.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    deadline_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Want no more tokens of a request, which may have ended."""

    id: int


@dataclass(frozen=True, slots=True)
class AskMetrics:
    """Answered by `Metrics` of the same number."""

    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel all, give everything back, end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded, its graphs are captured.

    Attributes:
        max_context: Tokens of a request, prompt included.
        kv_tokens: Tokens that the pages hold.
        vocab_size: Of the model.
    """

    max_context: int
    kv_tokens: int
    vocab_size: int

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may be generated behind a prompt; the last one needs no keys."""
        return min(self.max_context, self.kv_tokens) - prompt_tokens + 1


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of the engine.

    Attributes:
        kind: Name of its class.
        message: What it says.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request waits for its turn."""

    id: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be served; nothing of it is kept."""

    id: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended.

    Attributes:
        reason: As in `Completion`; "error" with a fault.
        fault: Why it failed.
    """

    reason: FinishReason
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens in the order of their drawing.

    Attributes:
        ids: A request each.
        tokens: Its token; None where it failed.
        ends: Of those that ended by their last entry.
        cached: Tokens of their prompt that were in the pool already, of those whose first token is
            here: a stop text may end a request of which no end comes.
    """

    ids: tuple[int, ...]
    tokens: tuple[int | None, ...]
    ends: dict[int, End]
    cached: dict[int, int]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Prometheus text."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine ends, or never began."""

    fault: Fault


ToEngine = Submit | Cancel | AskMetrics | Stop
FromEngine = Ready | Accepted | Refused | Drawn | Metrics | Failed
