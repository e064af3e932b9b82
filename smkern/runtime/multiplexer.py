"""Serving on one GPU that prefill and decode share: the loop that polls, asks and launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from time import perf_counter

from smkern.errors import ArgumentError, DeviceError, SmkernError
from smkern.limits import as_int
from smkern.models.sampling import SamplingParams
from smkern.models.tokenizer import Tokenizer
from smkern.policies import Chunked, Policy, order_named
from smkern.policies.check import checked_policy
from smkern.runtime.executor import Executor, MemoryReport
from smkern.runtime.handle import Handle, Output
from smkern.runtime.in_flight import LaunchError
from smkern.runtime.input_processor import InputProcessor, Prompt
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.output_processor import OutputProcessor
from smkern.runtime.queues import Preemption, RequestQueues, no_pages_error
from smkern.runtime.request import Request
from smkern.runtime.scheduler import Outcome, Scheduler
from smkern.runtime.sim.fast_forward import fast_forward
from smkern.runtime.step_log import StepLog
from smkern.runtime.timeline.stats import Stats, StatsMeter
from smkern.runtime.timeline.timeline import Timeline
from smkern.runtime.watchdog import Arrivals, Watchdog, as_time, catch_up, earliest

STALL_S = 60.0
BLOCKED_US = 1e3  # between two looks where nothing is on its way and nothing can be launched


class Multiplexer:
    """Serves requests on one GPU that prefill and decode share as a policy says.

    One thread: `step` polls the device, hands out the tokens that came, asks the policy where
    something can be launched, carries its decision out, and returns without waiting. Decode is
    launched first. What fails takes its own requests along, and no others.

    Args:
        executor: Runs the model: a `ModelExecutor` (slow on a CPU); `SimExecutor` runs none.
        policy: Decides. None: `smkern.policies.Chunked()`.
        tokenizer: For prompts that are texts, for stop texts, and for text in outputs.
        seed: Seed for requests without one of their own.
        preemption: When pages run out, the last by priority and arrival gives way: "recompute"
            gives its pages back, "keep" pauses it with its pages while others can go on.
        batch_invariant: The decoder's mode: prompts are cut, and begun anew, so that a request's
            tokens are the same, bit for bit, as when it runs alone.
        impatient: Whether the side of a split that grows moves at once; see `Interleaver`.
        prepare_ahead: Whether the next step of an unchanged batch is prepared behind the last one.
        stall_timeout_s: A launch that is not over for so long is reported.
        timeline: Where launches, decisions and tokens are recorded. None: a new one.
        log: Is told when tokens come; outputs are then the ends of requests alone. For replays.

    Attributes:
        timeline: As given.

    Raises:
        ArgumentError: settings that cannot be, or a policy that the device cannot carry out.

    Source: MuxWise section 3.2, DRIFT section 3.3, DuetServe section 4.3, Bullet section 3.4.

    Example:
        >>> from smkern.models import SamplingParams, preset
        >>> from smkern.runtime import Multiplexer, SimExecutor
        >>> mux = Multiplexer(SimExecutor(preset("qwen3-8b"), num_pages=64))
        >>> handle = mux.submit([1, 2, 3], SamplingParams(max_new_tokens=4, ignore_eos=True))
        >>> sum(output.token is not None for output in mux.run()), handle.done
        (4, True)
    """

    def __init__(
        self,
        executor: Executor,
        *,
        policy: Policy | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
        preemption: Preemption = "recompute",
        batch_invariant: bool = False,
        impatient: bool = False,
        prepare_ahead: bool = True,
        stall_timeout_s: float = STALL_S,
        timeline: Timeline | None = None,
        log: StepLog | None = None,
    ) -> None:
        device = executor.device
        self.timeline = timeline = timeline or Timeline(device.num_sms, clock=device.now_us)
        self._executor = executor
        self._lanes = Interleaver(
            device,
            impatient=impatient,
            on_launch=timeline.launched,
            on_over=timeline.over,
        )
        policy = checked_policy(Chunked() if policy is None else policy, device)
        self._queues = RequestQueues(
            executor.pool, preemption, batch_invariant, executor.max_running, self._gave_way,
            order_named(getattr(policy, "order", "fcfs")),
            lambda error: self._scheduler.report(error),
        )  # fmt: skip
        self._launcher = BatchLauncher(
            executor, self._lanes, self._queues, batch_invariant, lambda: self._outputs.flush(),
            prepare_ahead,
        )  # fmt: skip
        self._meter = StatsMeter(timeline, config=executor.config)
        self._inputs = InputProcessor(executor, tokenizer, Random(seed), batch_invariant)
        self._outputs = OutputProcessor(
            self._launcher, self._meter, self._inputs, self._finished, log
        )
        self._requests: dict[int, Request] = {}
        self._scheduler = Scheduler(
            policy, executor, self._lanes, self._queues, self._launcher, self._requests, timeline
        )
        self._watchdog = Watchdog(stall_timeout_s)
        self._fast_forward = fast_forward(
            executor, policy, log is None or not timeline.is_off, self._lanes, self._queues,
            self._launcher, self._outputs, self._scheduler, self._watchdog,
        )  # fmt: skip
        self._future = Arrivals()
        self._count = 0
        self._preemptions = 0
        self._changed = False
        self._unread: deque[Output] = deque()
        self._is_closed = False

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_ms: float | None = None,
        arrival_us: float | None = None,
    ) -> Handle:
        """Queue a request; nothing is launched.

        Args:
            prompt: Token ids, or a text.
            params: How its tokens are drawn. None: 128 greedy tokens.
            priority: Higher goes first, and takes the row and pages of a lower one that decodes.
            deadline_ms: When its first token is wanted, after its arrival; for policies.
            arrival_us: When it comes, on the device's clock; for replays. None: now.

        Raises:
            RequestError: a prompt or values that cannot be served.
            OutOfPagesError: it could not fit even alone.
            ArgumentError: the runtime is closed, or a priority or time that is no number.
        """
        if self._is_closed:
            raise ArgumentError("this Multiplexer is closed: make another")
        priority = as_int("priority", priority, -(2**31), 2**31)
        now_us = self._lanes.device.now_us()
        come_us = now_us if arrival_us is None else as_time("arrival_us", arrival_us)
        wait_ms = inf if deadline_ms in (None, inf) else as_time("deadline_ms", deadline_ms)
        request = self._inputs.process(self._count, prompt, params)
        request.priority, request.arrival_us = priority, come_us
        request.deadline_us = come_us + 1e3 * wait_ms
        self._requests[self._count] = request
        self._count += 1
        if come_us <= now_us:
            self._arrive(request)
        else:
            self._future.add(request)
        return Handle(request, self.cancel)

    def cancel(self, request: Handle | int) -> None:
        """Want no more tokens of a request; one that has ended is left as it is.

        Raises:
            ArgumentError: no such request, or another runtime's.
        """
        if isinstance(request, Handle) and not request.is_of(self.cancel):
            raise ArgumentError(f"{request} is of another Multiplexer: call its own cancel()")
        id_ = request.id if isinstance(request, Handle) else request
        if type(id_) is not int or not 0 <= id_ < self._count:
            raise ArgumentError(f"request {id_!r}: this Multiplexer has had {self._count} of them")
        found = self._requests.get(id_)
        if found is not None:
            self._outputs.flush()
            found.is_cancelled = True
            self._end(found)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs, or is on its way."""
        return not (self._requests or self._launcher.in_flight or self._unread)

    # The loop.

    def run(self) -> Iterator[Output]:
        """Serve until nothing is left, also of what is submitted meanwhile; yields every token as
        it comes. Raises as `step`."""
        while not self.is_idle:
            had_none = not self._unread
            if had_none:
                self._unread += self.step()
            while self._unread:  # one by one: a caller that stops finds the rest next time
                had_none = False
                yield self._unread.popleft()
            if had_none and not self._changed:
                self._wait()

    def step(self) -> list[Output]:
        """Poll, decide, launch, hand out; returns without waiting.

        Tokens are handed out first where a request may end by them: then it matters to what is
        launched next. In front of them is what a `run` that was left had not yielded.
        With nothing to do at all, decode graphs that were missed are captured, which waits.

        Raises:
            StalledError: nothing that was launched has ended for `stall_timeout_s`, or nothing
                could be launched; the timeline so far is there.
        """
        began = perf_counter()
        try:
            if self._future:
                for request in self._future.due(self._lanes.device.now_us()):
                    self._arrive(request)
            self._poll()
            if self._changed or self._scheduler.is_due:
                self._changed = False
                if self._launcher.steady is None or self._queues.paused:
                    self._outputs.flush()
                self._queues.resume()
                self._decide(began)
            elif not self._launcher.in_flight and not self._scheduler.rests:
                self._unblock() if self._requests else catch_up(self._executor, self.timeline)
        finally:
            self._outputs.step_over()
        outputs, self._outputs.outputs = [*self._unread, *self._outputs.outputs], []
        self._unread.clear()
        return outputs

    @property
    def errors(self) -> Sequence[tuple[float, SmkernError]]:
        """The last errors of the policy, with their times on the device's clock."""
        return tuple(self._scheduler.errors)

    @property
    def control_us(self) -> Sequence[float]:
        """Host time of the last steps that launched decode: polled, decided and launched, without
        what is done behind it."""
        return tuple(self._scheduler.control_us)

    def stats(self) -> Stats:
        """Tokens, waits, bubbles, switches and work so far."""
        return self._meter.stats(self._lanes.device.now_us(), preemptions=self._preemptions)

    def metrics_text(self) -> str:
        """`stats` as Prometheus text; ArgumentError where prometheus-client is not installed."""
        from smkern.runtime.timeline.metrics import metrics_text

        return metrics_text(self.stats)

    def memory_report(self) -> MemoryReport:
        """Device memory of graphs, partitions, activations, state and pages."""
        return self._executor.memory_report()

    def close(self) -> None:
        """Cancel everything, wait for what is launched, destroy the graphs. Twice is fine."""
        if self._is_closed and not self._launcher.in_flight:
            return
        self._is_closed = True
        self._outputs.flush()
        for request in list(self._requests.values()):
            request.is_cancelled = True
            self._end(request)
        while self._launcher.in_flight:
            self._poll()
            if self._launcher.in_flight:
                self._lanes.wait()
        for batch in (self._launcher.batch, self._launcher.preempted):
            for request in () if batch is None else batch.requests:
                self._queues.release(request)
        self._executor.close()

    def _arrive(self, request: Request) -> None:
        self._queues.wait(request)
        self._meter.arrived(request.index, request.arrival_us, prompt_tokens=request.prompt_len)
        self._changed = True

    def _wait(self) -> None:
        until_us = earliest(self._future.next_us, self._scheduler.again_us)
        if not self._launcher.in_flight and until_us is None:
            if not self._requests:
                return
            until_us = self._lanes.device.now_us() + BLOCKED_US
        if not self.timeline.settle_for():
            return
        if self._fast_forward is not None:
            self._fast_forward(until_us)
        self._lanes.wait(until_us)

    def _poll(self) -> None:
        """What is over: its tokens to their requests."""
        try:
            over = self._lanes.poll()
        except DeviceError as error:
            self._device_failed(error)
            return
        for ticket in over:
            self._outputs.over(ticket, self._launcher.in_flight.pop(ticket))
        self._scheduler.observer.over(over)
        self._changed = self._changed or bool(over) or self._lanes.has_room_again()
        now_us, in_flight = self._lanes.device.now_us(), self._launcher.in_flight
        self._watchdog.look(now_us, bool(over), in_flight, self._queues.has_any)

    def _finished(self, request: Request) -> None:
        self._end(request) if request.error is None else self._fail([request], request.error)

    def _decide(self, began: float) -> None:
        """Let what can be launched be decided and launched."""
        try:
            outcome = self._scheduler.act(began)
            if outcome is Outcome.STUCK:
                self._unblock(is_stuck=True)
            self._changed = self._changed or outcome is Outcome.GOES_ON
        except LaunchError as error:
            self._outputs.flush()
            self._launcher.fence(requests=error.requests)
            self._fail(error.requests, error)

    # What goes wrong.

    def _unblock(self, *, is_stuck: bool = False) -> None:
        """Pages stand in the way of all, or nothing was asked yet: give some back and ask again."""
        self._outputs.flush()
        batch, pool = self._launcher.batch, self._queues.pool
        self._changed = not is_stuck or (batch is None and not pool.poll())
        if batch is None:
            request = self._queues.unblock(is_stuck=is_stuck)
            if request is not None:
                self._fail([request], no_pages_error(request, pool))

    def _gave_way(self, request: Request, begins_anew: bool) -> None:
        """Pages were short: a request pauses, or begins anew."""
        self._preemptions += 1
        self.timeline.note("preempted", request=request.index, begins_anew=begins_anew)
        if begins_anew:
            self._executor.forget(request)

    def _fail(self, requests: Sequence[Request], error: SmkernError) -> None:
        """These requests, and those of their batches, end with an error; the others go on."""
        requests = self._launcher.lose(requests)
        for request in requests:
            if request.stage != "done":
                request.error = error
                self._outputs.outputs.append(Output(request.index, None, error=error))
                self._end(request, computing=False)
            else:  # cancelled before
                self._queues.release(request)
                self._executor.forget(request)
        self.timeline.note(
            "failed", error=str(error), requests=[request.index for request in requests]
        )
        self._changed = True

    def _device_failed(self, error: DeviceError) -> None:
        """The device reported an error of a launch: it has failed; after an error that stays, as
        CUDA's do, all that is on its way has."""
        self._outputs.flush()
        gone = self._lanes.abandon(self._lanes.failed)
        if not self._launcher.fence(gone):
            gone += self._lanes.abandon()
        self.timeline.abandoned(gone)
        in_flight = [self._launcher.in_flight.pop(ticket) for ticket in gone]
        lost = dict.fromkeys(request for launch in in_flight for request in launch.requests)
        self._fail(list(lost), error)
        self._queues.pool.forget_prefixes()  # what was to be written is named already

    def _end(self, request: Request, *, computing: bool = True) -> None:
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
        self._changed = True
