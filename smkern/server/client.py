"""The server's end of the pipe: requests in, their tokens out, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from threading import Thread
from typing import NamedTuple

from smkern.models.sampling import SamplingParams
from smkern.server.messages import (
    Accepted,
    AskMetrics,
    Cancel,
    Drawn,
    End,
    Failed,
    Fault,
    FromEngine,
    Metrics,
    Refused,
    Stop,
    Submit,
    ToEngine,
)

GONE = Fault("EngineDeadError", "the engine's process ended without a word: its log says why")


class EngineError(Exception):
    """An error of the engine, where its request was made."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class Event(NamedTuple):
    """What one choice of a generation got.

    Attributes:
        choice: Its number.
        token: None where it failed.
        end: How it ended, if by this.
        cached: Tokens of its prompt that were computed already, told with the first token.
    """

    choice: int
    token: int | None
    end: End | None
    cached: int | None = None


class Generation:
    """The choices of one HTTP request, drawn side by side; an iterator of lists of events.

    It ends when all choices have, or when it is closed.
    """

    def __init__(self, client: EngineClient, ids: Sequence[int]) -> None:
        self._client = client
        self._ids = tuple(ids)
        self._live = set(range(len(ids)))
        self._events: list[Event] = []
        self._news = asyncio.Event()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Event]:
        """All that came since the last one: a reader that is slow gets more at a time."""
        while not self._events:
            if not self._live:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        events, self._events = self._events, []
        return events

    @property
    def is_over(self) -> bool:
        """Whether all choices have ended, and all of them was read."""
        return not (self._live or self._events)

    def put(self, event: Event) -> None:
        """What came of the engine."""
        self._events.append(event)
        if event.end is not None:
            self._live.discard(event.choice)
        self._news.set()

    def cancel(self, index: int) -> None:
        """Want no more of one choice; the rest goes on."""
        if index in self._live:
            self._live.discard(index)
            self._client.forget(self._ids[index])
            self._events = [event for event in self._events if event.choice != index]
            self._news.set()

    def close(self) -> None:
        """Want no more of any. Twice is fine."""
        for index in tuple(self._live):
            self.cancel(index)


class EngineClient:
    """Speaks to the engine for all requests of one event loop.

    Args:
        connection: The server's end of a duplex pipe.

    Attributes:
        failure: Why the engine serves no more; None: it does.
        on_failure: Called once the engine has failed or is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self.failure: Fault | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._connection = connection
        self._numbers = count()
        self._readers: dict[int, tuple[Generation, int]] = {}
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._is_stopping = False
        # The pipe blocks, each way in a thread of its own: a loop that watched it (uvloop) would
        # make it non-blocking, and cut what it does not take at once.
        self._sender = ThreadPoolExecutor(1, "to-engine")

    @property
    def num_live(self) -> int:
        """Choices that were not finished yet."""
        return len(self._readers)

    def start(self) -> None:
        """Hand what comes to the event loop that runs."""
        loop = asyncio.get_running_loop()
        Thread(target=self._listen, args=(loop,), name="from-engine", daemon=True).start()

    def stop(self) -> None:
        """Have the engine give everything back and end."""
        self._send(Stop())
        self._is_stopping = True
        self._sender.shutdown(wait=False)

    async def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], *,
        priority: int = 0, deadline_ms: float | None = None,
    ) -> Generation:  # fmt: skip
        """Submit choices; returns once the engine has taken all of them.

        Args:
            prompts, params: A prompt each, and how tokens are drawn behind it.
            priority, deadline_ms: Of all of them, see `Multiplexer.submit`.

        Raises:
            EngineError: one was refused, or the engine is gone; none runs.
        """
        ids = [next(self._numbers) for _ in prompts]
        generation = Generation(self, ids)
        answers = []
        for index, (id_, prompt, how) in enumerate(zip(ids, prompts, params, strict=True)):
            self._readers[id_] = generation, index
            answers.append(self._ask(Submit(id_, prompt, how, priority, deadline_ms)))
        try:
            await asyncio.gather(*answers)
        except BaseException:
            generation.close()
            raise
        return generation

    async def metrics(self) -> str:
        """The runtime's metrics, Prometheus text.

        Raises:
            EngineError: it could not make them, or is gone.
        """
        return await self._ask(AskMetrics(next(self._numbers)))

    def forget(self, id_: int) -> None:
        """Want no more tokens of a choice."""
        if self._readers.pop(id_, None) is not None:
            self._send(Cancel(id_))

    def _ask(self, message: Submit | AskMetrics) -> asyncio.Future[str]:
        answer = asyncio.get_running_loop().create_future()
        # Of several, the first that fails is told; the others are looked at by nobody.
        answer.add_done_callback(lambda x: x.cancelled() or x.exception())
        if self.failure is not None:
            answer.set_exception(EngineError(self.failure))
        else:
            self._answers[message.id] = answer
            self._send(message)
        return answer

    def _send(self, message: ToEngine) -> None:
        if not self._is_stopping:
            self._sender.submit(self._put, message)

    def _put(self, message: ToEngine) -> None:
        with suppress(OSError):  # reading tells that the engine is gone
            self._connection.send(message)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        message: FromEngine | None = None
        while not isinstance(message, Failed):
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = Failed(GONE)
            with suppress(RuntimeError):  # a loop that has ended wants no more
                loop.call_soon_threadsafe(self._got, message)

    def _got(self, message: FromEngine) -> None:
        match message:
            case Drawn():
                self._drawn(message)
            case Accepted(id_):
                self._answered(id_, "")
            case Metrics(id_, text):
                self._answered(id_, text)
            case Refused(id_, fault):
                self._readers.pop(id_, None)
                self._answered(id_, EngineError(fault))
            case Failed(fault):
                self._failed(fault)

    def _drawn(self, message: Drawn) -> None:
        ends, cached = message.ends, message.cached
        if not (ends or cached):  # most steps begin and end nothing
            for id_, token in zip(message.ids, message.tokens, strict=True):
                if (reader := self._readers.get(id_)) is not None:
                    reader[0].put(Event(reader[1], token, None))
            return
        last = {id_: at for at, id_ in enumerate(message.ids)}
        for at, (id_, token) in enumerate(zip(message.ids, message.tokens, strict=True)):
            end = ends.get(id_) if last[id_] == at else None
            reader = self._readers.get(id_) if end is None else self._readers.pop(id_, None)
            if reader is not None:
                reader[0].put(Event(reader[1], token, end, cached.get(id_)))

    def _answered(self, id_: int, answer: str | EngineError) -> None:
        future = self._answers.pop(id_, None)
        if future is None or future.done():
            return
        if isinstance(answer, str):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _failed(self, fault: Fault) -> None:
        if self._is_stopping:
            return
        self.failure = fault
        for id_ in [*self._answers]:
            self._answered(id_, EngineError(fault))
        readers, self._readers = self._readers, {}
        for generation, index in readers.values():
            generation.put(Event(index, None, End("error", fault=fault)))
        self.on_failure()
