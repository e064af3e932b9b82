"""How requests leave: finished, cancelled or failed, alone or all of them; what they held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from smkern.errors import DeviceError, EngineDeadError, SmkernError, StalledError
from smkern.kv import Event
from smkern.runtime.executor import Executor
from smkern.runtime.handle import Output
from smkern.runtime.in_flight import AllOver, LaunchError
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.output_processor import OutputProcessor
from smkern.runtime.owner import Owner
from smkern.runtime.place import LANES
from smkern.runtime.queues import RequestQueues, no_pages_error
from smkern.runtime.request import Request
from smkern.runtime.scheduler import Scheduler
from smkern.runtime.ticket import Ticket
from smkern.runtime.timeline.stats import StatsMeter
from smkern.runtime.timeline.timeline import Timeline
from smkern.runtime.watchdog import Watchdog


@dataclass(eq=False)
class Finisher:
    """Ends requests and gives back what they hold.

    A launch, a read of tokens or a text that fails takes its own requests along. What raises
    anywhere else, in a pool, in `Executor.forget` or in a clock, leaves nobody who knows whose
    pages are whose: then all requests end, and the runtime with them.

    All parts are the runtime's; its owner is told that it is dead.
    """

    _executor: Executor
    _lanes: Interleaver
    _queues: RequestQueues
    _launcher: BatchLauncher
    _scheduler: Scheduler
    _outputs: OutputProcessor
    _meter: StatsMeter
    _timeline: Timeline
    _owner: Owner
    _requests: dict[int, Request]
    """Those that have not ended, by id."""
    is_clean: bool = field(default=False, init=False)
    """Whether `clean` came to its end."""

    def end(self, request: Request, *, computing: bool = True) -> None:
        """A request leaves; its pages come back once nothing reads or writes them.

        Args:
            request: The request.
            computing: Whether a batch that it is part of still writes its pages.
        """
        if request.stage == "done":
            return
        in_batch = request.stage == "prefill" and computing
        self._queues.commit(request)
        self._queues.drop(request)
        request.stage = "done"
        if not in_batch:  # else `BatchLauncher.joined` releases it
            self._queues.release(request)
            self._executor.forget(request)
        del self._requests[request.index]
        reason = "failed" if request.error else "cancelled" if request.is_cancelled else None
        if reason is None:
            assert request.completion is not None
            reason = request.completion.finish_reason
        self._meter.finished(request.index, self._lanes.device.now_us(), reason)
        self._scheduler.has_news = True

    def cancel(self, request: Request) -> None:
        """A request ends as its owner wants it, unless its last token went out."""
        if request.stage != "done":
            request.is_cancelled = True
            self.end(request)

    def finished(self, request: Request) -> None:
        """A request's tokens are all there, or one of them failed."""
        self.end(request) if request.error is None else self.fail([request], request.error)

    def fail(self, requests: Sequence[Request], error: SmkernError) -> None:
        """These requests, and those of their batches, end with an error; the others go on."""
        requests = self._launcher.lose(requests)
        for request in requests:
            if request.stage != "done":
                request.error = error
                self._outputs.outputs.append(Output(request.index, None, error=error))
                self.end(request, computing=False)
            else:  # cancelled before
                self._queues.release(request)
                self._executor.forget(request)
        self._timeline.note(
            "failed", error=str(error), requests=[request.index for request in requests]
        )
        self._scheduler.has_news = True

    def unblock(self, *, is_stuck: bool = False) -> None:
        """Pages stand in the way of all, or nothing was asked yet: give some back and ask again."""
        self._outputs.flush()
        batch, pool = self._launcher.batch, self._queues.pool
        self._scheduler.has_news = not is_stuck or (batch is None and not pool.poll())
        if batch is None:
            request = self._queues.unblock(is_stuck=is_stuck)
            if request is not None:
                self.fail([request], no_pages_error(request, pool))

    def launch_failed(self, error: LaunchError) -> None:
        """A launch raised, or its tokens could not be read."""
        self._outputs.flush()
        self._fence([*error.requests, *error.beside])
        for request in error.beside:  # its row may be a token ahead: it comes again from the host
            self._executor.forget(request)
        self.fail(error.requests, error)

    def device_failed(self, error: DeviceError) -> None:
        """The device reported an error of a launch: it has failed; after an error that stays, as
        CUDA's do, all that is on its way has."""
        self._outputs.flush()
        gone, in_flight = self._lanes.abandon(self._lanes.failed), self._launcher.in_flight
        if not self._fence([x for ticket in gone for x in in_flight[ticket].requests]):
            gone += self._lanes.abandon()
        self._timeline.abandoned(gone)
        launches = [in_flight.pop(ticket) for ticket in gone]
        self.fail(list(dict.fromkeys(x for launch in launches for x in launch.requests)), error)
        self._queues.pool.forget_prefixes()  # what was to be written is named already

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Changes that are made to the end, or end everything.

        Raises:
            EngineDeadError: they were not.
        """
        try:
            yield
        except BaseException as error:
            self.die(error, what)
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(str(self._owner.dead)) from error

    def caught(self, error: BaseException, *, is_whole: bool = False) -> None:
        """What came out of the loop ends everything; all are told why.

        Args:
            error: It. A hang changes nothing, and is raised.
            is_whole: Whether nothing is half changed: then an interrupt ends nothing.

        Raises:
            BaseException: what is no error, but an interrupt; or a hang.
        """
        is_error = isinstance(error, Exception)
        if not (isinstance(error, StalledError) or (is_whole and not is_error)):
            self.die(error)
            if is_error:
                return
        raise error

    def die(self, reason: BaseException, what: str = "step") -> None:
        """Something raised midway: all requests end, and the runtime takes no more."""
        error = EngineDeadError(
            f"{type(reason).__name__} in the middle of {what}() left this Multiplexer half "
            f"changed ({reason}): close() gives back what it holds; make another"
        )
        error.__cause__ = reason
        self._owner.dead = error
        self.end_all(error)
        with suppress(Exception):  # `clean` tries again, and says what failed
            self.give_back(self.on_their_way())
        self._launcher.reset()

    def cancel_all(self) -> None:
        """Every request ends, as its owner wants it; of a dead runtime, as what it died of."""
        if self._owner.dead is None:
            with suppress(EngineDeadError), self.guard("close"):
                self._outputs.flush()
                for request in list(self._requests.values()):
                    self.cancel(request)
        if self._owner.dead is not None:
            self.end_all(self._owner.dead)

    def clean(self, watchdog: Watchdog, *, force: bool) -> None:
        """Wait for what is launched, give everything back, close the executor.

        Args:
            watchdog: Tells a device that hangs.
            force: Whether what does not end is left behind then; the executor stays open.

        Raises:
            SmkernError: something does not end, or cannot be waited for, without `force`; or the
                pool or the executor raised, behind all that could be done.
        """
        end = self.on_their_way()
        is_over = True
        try:
            self._drain(end, watchdog)
        except Exception as error:  # noqa: BLE001  raised by name
            if not force:
                _raise_named(error)
            is_over = False
        if is_over:  # what is left behind says itself when its pages may be written
            self._timeline.abandoned(self._lanes.abandon())
        self._launcher.reset()
        failed: list[Exception] = []
        calls: list[Callable[[], None]] = [partial(self.give_back, end)]
        for call in (*calls, self._executor.close) if is_over else calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001  raised behind the others
                failed.append(error)
        if failed and not force:
            _raise_named(failed[0])
        self.is_clean = True

    def _drain(self, end: AllOver, watchdog: Watchdog) -> None:
        """Wait for all that is launched; its tokens are nobody's any more."""
        device, in_flight = self._lanes.device, self._launcher.in_flight
        if not in_flight:  # what nobody looked at for long has not hung for so long
            watchdog.look(device.now_us(), True, in_flight, True)
        while not end.query():
            over: list[Ticket] = []
            with suppress(DeviceError):  # it is over then
                over = self._lanes.poll()
            for ticket in over:
                in_flight.pop(ticket, None)
            watchdog.look(device.now_us(), bool(over), in_flight, True)
            device.wait([x for x in end.events if not x.query()])

    def end_all(self, error: SmkernError) -> None:
        """Every request ends, without a look at the queues; who was told of its end is not told
        again."""
        outputs = self._outputs.outputs
        told = {x.id for x in outputs if x.completion is not None or x.error is not None}
        told |= {x.index for x in self._outputs.leaving if x.completion is not None}
        for index, request in list(self._requests.items()):
            request.stage = "done"
            if index not in told and not request.is_cancelled:
                request.completion, request.error = None, request.error or error
                outputs.append(Output(index, None, error=request.error))
            self._queues.holders.add(request)
            del self._requests[index]

    def on_their_way(self) -> AllOver:
        """The end of all that is launched, of what raised midway too."""
        events = [ticket.event for lane in LANES for ticket in self._lanes.tickets(lane)]
        for lane in LANES:
            with suppress(Exception):  # a device that takes nothing more runs nothing either
                events.append(self._lanes.fence(lane))
        return AllOver(tuple(events))

    def give_back(self, end: Event) -> None:
        """Pages and rows of whoever still has some, whatever the queues say, once `end` is over.

        Raises:
            Exception: what the pool or the executor raised first; the others were given back.
        """
        pool, holders = self._queues.pool, self._queues.holders
        held = {*pool.requests}
        failed: Exception | None = None
        for request in list(holders):
            try:
                if request in held:
                    pool.release(request, end)
                self._executor.forget(request)
                holders.discard(request)
            except Exception as error:  # noqa: BLE001  raised behind the others
                failed = failed or error
        pool.forget_prefixes()  # what was to be written may not be
        pool.poll()
        if failed is not None:
            raise failed

    def _fence(self, requests: Iterable[Request]) -> bool:
        """What of these requests runs is over behind both lanes; whether the device still takes
        work. One that does not runs nothing either."""
        for _ in range(3):  # a device that is lost raises again
            with suppress(Exception):
                end = AllOver(tuple([self._lanes.fence(lane) for lane in LANES]))
                for request in requests:
                    request.last_use = end
                return True
        return False


def _raise_named(error: Exception) -> NoReturn:
    """Raise an error of closing, by name."""
    if isinstance(error, SmkernError):
        raise error
    raise EngineDeadError(
        f"{type(error).__name__} while this Multiplexer was closed ({error}): what could be given "
        "back was; close it again, with force=True to leave the rest behind"
    ) from error
