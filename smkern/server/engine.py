"""The engine's process: a `Multiplexer` that is told by a pipe what to serve."""

from __future__ import annotations

import select
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from time import perf_counter

from smkern.errors import DeviceError, SmkernError
from smkern.runtime.handle import Handle, Output
from smkern.runtime.multiplexer import Multiplexer
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
    Ready,
    Refused,
    Stop,
    Submit,
    ToEngine,
)

RECEIVE_S = 1e-3
"""What comes is taken for so long between two steps, which would wait for it: a prompt of 100,000
tokens takes 6 ms."""

Open = Callable[[], AbstractContextManager[tuple[Multiplexer, Ready]]]
"""Opens a runtime, and closes it; for a process of its own it can be pickled."""


def run_engine(connection: Connection, open_runtime: Open) -> None:
    """Serve what comes by a pipe until its other end stops or is gone; the body of a process.

    Signals of the terminal or of a service manager reach both processes: the other one finishes
    its responses first, and then stops this one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve_connection(connection, open_runtime)


def serve_connection(connection: Connection, open_runtime: Open) -> None:
    """As `run_engine`, in any thread; what fails is told to the other end."""
    try:
        with open_runtime() as (mux, ready):
            connection.send(ready)
            EngineLoop(mux, connection).run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # nobody is left to be told
    except Exception as error:  # noqa: BLE001  the other end says it, and ends
        if not isinstance(error, SmkernError):
            traceback.print_exc()
        with suppress(OSError):
            connection.send(Failed(Fault.of(error)))
    finally:
        connection.close()


class EngineLoop:
    """Turns the loop of a runtime, and looks at the pipe between two steps.

    Args:
        mux: Serves; this loop drives it.
        connection: The engine's end of a duplex pipe.
    """

    def __init__(self, mux: Multiplexer, connection: Connection) -> None:
        self._mux = mux
        self._connection = connection
        self._incoming, self._outgoing = select.poll(), select.poll()
        self._incoming.register(connection.fileno(), select.POLLIN)
        self._outgoing.register(connection.fileno(), select.POLLOUT)
        self._theirs: dict[int, int] = {}  # our number of a request to the server's
        self._ours: dict[int, int] = {}
        self._ids: list[int] = []
        self._tokens: list[int | None] = []
        self._ends: dict[int, End] = {}
        self._fresh: dict[int, Handle] = {}  # by our number, until its first token
        self._cached: dict[int, int] = {}

    def run(self) -> None:
        """Until the other end says `Stop`, or is gone.

        Raises:
            SmkernError: the runtime is dead, or its device hangs or is lost.
        """
        while self._receive():
            outputs = self._mux.step()
            if outputs:
                self._keep(outputs)
            if self._ids and self._outgoing.poll(0):
                self._hand_out()  # a server that is slow gets more at a time, and stops nothing
            if self._mux.is_idle:
                self._hand_out()
                self._incoming.poll()
            elif not outputs:
                self._mux.wait()

    def _receive(self) -> bool:
        """Do what has come, or some of it; False: the other end wants no more."""
        until_s = perf_counter() + RECEIVE_S
        while self._incoming.poll(0):
            try:
                message: ToEngine = self._connection.recv()
            except (EOFError, ConnectionResetError):
                return False
            if isinstance(message, Stop):
                return False
            self._answer(message)
            if perf_counter() >= until_s:
                break
        return True

    def _answer(self, message: Submit | Cancel | AskMetrics) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, AskMetrics):
            self._send(Metrics(message.id, self._mux.metrics_text()))
        elif (ours := self._ours.pop(message.id, None)) is not None:
            del self._theirs[ours]
            self._fresh.pop(ours, None)
            self._mux.cancel(ours)

    def _submit(self, message: Submit) -> None:
        try:
            handle = self._mux.submit(
                message.prompt, message.params,
                priority=message.priority, deadline_ms=message.deadline_ms,
            )  # fmt: skip
        except SmkernError as error:
            if self._mux.dead is not None:
                raise
            self._send(Refused(message.id, Fault.of(error)))
            return
        self._ours[message.id], self._theirs[handle.id] = handle.id, message.id
        self._fresh[handle.id] = handle
        self._send(Accepted(message.id))

    def _keep(self, outputs: Sequence[Output]) -> None:
        """Tokens for the next message; those of requests that were cancelled are nobody's."""
        lost: SmkernError | None = None
        for ours, token, _, completion, error in outputs:
            theirs = self._theirs.get(ours)
            if isinstance(error, DeviceError):
                lost = error
            if theirs is None:
                continue
            self._ids.append(theirs)
            self._tokens.append(token)
            if self._fresh and (handle := self._fresh.pop(ours, None)) is not None:
                self._cached[theirs] = handle.cached_tokens or 0
            if completion is None and error is None:
                continue
            end = End("error", fault=Fault.of(error)) if error is not None else None
            if completion is not None and end is None:
                end = End(completion.finish_reason)
            assert end is not None
            self._ends[theirs] = end
            del self._theirs[ours], self._ours[theirs]
        if lost is not None:
            self._hand_out()
            raise lost

    def _hand_out(self) -> None:
        if self._ids:
            self._send(Drawn(tuple(self._ids), tuple(self._tokens), self._ends, self._cached))
            self._ids, self._tokens, self._ends, self._cached = [], [], {}, {}

    def _send(self, message: FromEngine) -> None:
        self._connection.send(message)
