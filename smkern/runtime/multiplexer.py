"""Serving on one GPU that prefill and decode share: the loop that polls, asks and launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from time import perf_counter

from smkern.errors import ArgumentError, DeviceError, EngineDeadError, SmkernError, StalledError
from smkern.limits import as_int, shown
from smkern.models.sampling import SamplingParams
from smkern.models.tokenizer import Tokenizer
from smkern.policies import Chunked, Policy, order_named
from smkern.policies.check import checked_policy
from smkern.runtime.executor import Executor, MemoryReport
from smkern.runtime.finisher import Finisher
from smkern.runtime.handle import Handle, Output
from smkern.runtime.in_flight import LaunchError
from smkern.runtime.input_processor import InputProcessor, Prompt
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.options import check_options, device_of
from smkern.runtime.output_processor import OutputProcessor
from smkern.runtime.owner import Owner
from smkern.runtime.queues import Preemption, RequestQueues
from smkern.runtime.request import Request
from smkern.runtime.scheduler import Outcome, Scheduler
from smkern.runtime.sim.fast_forward import fast_forward
from smkern.runtime.step_log import StepLog
from smkern.runtime.timeline.stats import Stats, StatsMeter
from smkern.runtime.timeline.timeline import Timeline
from smkern.runtime.watchdog import Arrivals, Watchdog, as_time, as_wait, catch_up, earliest

STALL_S = 60.0
BLOCKED_US = 1e3  # between two looks where nothing is on its way and nothing can be launched


class Multiplexer:
    """Serves requests on one GPU that prefill and decode share as a policy says.

    One thread, the first that calls it: `step` polls the device, hands out the tokens that came,
    asks the policy where something can be launched, carries its decision out, and returns without
    waiting. Decode is launched first. What fails takes its own requests along, and no others; what
    leaves it half changed, as an interrupt in the middle of a step or a pool that raises, ends all
    with `EngineDeadError`.

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
        stall_timeout_s: A launch that is not over for so long is reported.
        timeline: Where launches, decisions and tokens are recorded. None: a new one, which says
            beside each launch how long the policy's `predictor`, if it has one, expects it to take.
        log: For replays: is told of tokens; `stats` has none, and outputs are requests' ends alone.

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
        stall_timeout_s: float = STALL_S,
        timeline: Timeline | None = None,
        log: StepLog | None = None,
    ) -> None:
        flags = {"batch_invariant": batch_invariant}
        seed, device = check_options(timeline, log, tokenizer, seed, flags), device_of(executor)
        policy = checked_policy(Chunked() if policy is None else policy, device)
        self.timeline = timeline = timeline or Timeline(
            device.num_sms, clock=device.now_us, predictor=getattr(policy, "predictor", None)
        )
        self._executor = executor
        self._lanes = Interleaver(
            device, impatient=impatient, on_launch=timeline.launched, on_over=timeline.over
        )
        self._queues = RequestQueues(
            executor.pool, preemption, batch_invariant, executor.max_running, self._gave_way,
            order_named(getattr(policy, "order", "fcfs")),
            lambda error: self._scheduler.report(error),
        )  # fmt: skip
        self._launcher = BatchLauncher(
            executor, self._lanes, self._queues, batch_invariant, lambda: self._outputs.flush()
        )
        self._meter = StatsMeter(timeline, config=executor.config)
        self._inputs = InputProcessor(executor, tokenizer, Random(seed), batch_invariant)
        self._outputs = OutputProcessor(
            self._launcher, self._meter, self._inputs, lambda x: self._finisher.finished(x), log
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
        self._owner = Owner()
        self._finisher = Finisher(
            executor, self._lanes, self._queues, self._launcher, self._scheduler, self._outputs,
            self._meter, timeline, self._owner, self._requests,
        )  # fmt: skip
        self._future = Arrivals()
        self._count = self._preemptions = 0
        self._unread: deque[Output] = deque()
        self._is_closed = False

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
            ArgumentError: the runtime is closed, another thread's, or in the middle of a step; or a
                priority or time that is no number.
            EngineDeadError: something has stopped it midway.
        """
        if self._is_closed:
            raise ArgumentError("this Multiplexer is closed: make another")
        self._owner.enter("submit")
        try:
            priority = as_int("priority", priority, -(2**31), 2**31)
            come_us = None if arrival_us is None else as_time("arrival_us", arrival_us)
            wait_ms = as_wait("deadline_ms", deadline_ms)
            request = self._inputs.process(self._count, prompt, params)
            request.priority = priority
            with self._finisher.guard("submit"):
                now_us = self._lanes.device.now_us()
                request.arrival_us = now_us if come_us is None else come_us
                request.deadline_us = request.arrival_us + 1e3 * wait_ms
                self._requests[self._count] = request
                self._count += 1
                if request.arrival_us <= now_us:
                    self._arrive(request)
                else:
                    self._future.add(request)
        finally:
            self._owner.is_inside = False
        return Handle(request, self.cancel)

    def cancel(self, request: Handle | int) -> None:
        """Want no more tokens of a request; one that has ended is left as it is.

        Raises:
            ArgumentError: no such request, another runtime's or thread's, or in the middle of a
                step.
            EngineDeadError: something has stopped the runtime midway, and it has not ended.
        """
        if isinstance(request, Handle) and not request.is_of(self.cancel):
            raise ArgumentError(f"{request} is of another Multiplexer: call its own cancel()")
        id_ = request.id if isinstance(request, Handle) else request
        if type(id_) is not int or not 0 <= id_ < self._count:
            raise ArgumentError(
                f"request {shown(id_)}: there were {self._count} of them here; give a handle of "
                "submit(), or its id"
            )
        found = self._requests.get(id_)
        if found is None:
            return
        self._owner.enter("cancel")
        try:
            with self._finisher.guard("cancel"):
                self._outputs.flush()
                self._finisher.cancel(found)
        finally:
            self._owner.is_inside = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs, or is on its way."""
        outputs = self._unread or self._outputs.outputs
        return not (self._requests or self._launcher.in_flight or outputs)

    def run(self) -> Iterator[Output]:
        """Serve until nothing is left, also of what is submitted meanwhile; yields every token as
        it comes. Raises as `step`."""
        while not self.is_idle:
            had_none = not self._unread
            if had_none:
                self._unread += self.step()
            while self._unread:  # one by one: a caller that stops finds the rest next time
                had_none = False
                output = self._unread[0]
                del self._unread[0]  # behind a call an interrupt might come, and lose it
                yield output
            if had_none:
                self.wait()

    def step(self) -> list[Output]:
        """Poll, decide, launch, hand out; returns without waiting.

        Tokens are handed out first where the device has its next step, and looked at first where a
        request may end by them: then it matters to what is launched next. In front of them is what
        a `run` that was left had not yielded.
        With nothing to do at all, decode graphs that were missed are captured, which waits.

        Raises:
            StalledError: nothing that was launched has ended for `stall_timeout_s`, or nothing
                could be launched; the timeline so far is there.
            ArgumentError: another thread's call, or one in the middle of another.
            EngineDeadError: something has stopped an earlier step midway.
        """
        began = perf_counter()
        self._owner.enter("step")
        try:
            try:
                self._advance(began)
            except StalledError:
                self._outputs.step_over()
                raise
            self._outputs.step_over()
            return self._take()
        except BaseException as error:  # noqa: BLE001  what is to be raised is
            self._finisher.caught(error)
            return self._take()
        finally:
            self._owner.is_inside = False

    def wait(self) -> None:
        """Let time go by until `step` may find something, a few ms at most; raises as it does."""
        if self._scheduler.has_news:
            return
        self._owner.enter("wait")
        is_whole = True
        try:
            until_us = earliest(self._future.next_us, self._scheduler.again_us)
            is_blocked = until_us is None and not self._launcher.in_flight
            if (is_blocked and not self._requests) or not self.timeline.settle_briefly():
                return
            if is_blocked:
                until_us = self._lanes.device.now_us() + BLOCKED_US
            if self._fast_forward is not None:
                is_whole = False
                self._fast_forward(until_us)
                is_whole = True
            self._lanes.wait(until_us)
        except BaseException as error:  # noqa: BLE001  what is to be raised is
            self._finisher.caught(error, is_whole=is_whole)
            self._unread += self._take()
        finally:
            self._owner.is_inside = False

    @property
    def dead(self) -> EngineDeadError | None:
        """What ended the runtime itself; None: it serves."""
        return self._owner.dead

    @property
    def errors(self) -> Sequence[tuple[float, SmkernError]]:
        """The last errors of the policy, with their times on the device's clock."""
        return tuple(self._scheduler.errors)

    @property
    def control_us(self) -> Sequence[float]:
        """Host time of the last steps that launched decode: polled, decided and launched."""
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

    def close(self, *, force: bool = False) -> None:
        """Cancel everything, wait for what is launched, destroy the graphs. Twice is fine.

        Args:
            force: Give up what does not end for `stall_timeout_s`, as on a device that hangs: its
                pages come back if it ever does, and the executor stays open.

        Raises:
            StalledError: what is launched does not end, without `force`; call it again with it.
            ArgumentError, EngineDeadError: as `step`; the pool or the executor raised, and all else
                was given back.
        """
        if self._finisher.is_clean:
            return
        self._owner.enter("close", is_last=True)
        try:
            self._is_closed = True
            self._finisher.cancel_all()
            self._take()
            self._finisher.clean(self._watchdog, force=force)
        finally:
            self._owner.is_inside = False

    def _arrive(self, request: Request) -> None:
        self._queues.wait(request)
        self._meter.arrived(request.index, request.arrival_us, prompt_tokens=request.prompt_len)
        self._scheduler.has_news = True

    def _take(self) -> list[Output]:
        outputs, self._outputs.outputs = [*self._unread, *self._outputs.outputs], []
        self._unread.clear()
        return outputs

    def _advance(self, began: float) -> None:
        scheduler = self._scheduler
        if self._future:
            for request in self._future.due(self._lanes.device.now_us()):
                self._arrive(request)
        self._poll()
        if scheduler.has_news or scheduler.is_due:
            has_next = self._lanes.queued("decode") > 0
            if self._launcher.steady is None or self._queues.paused or has_next:
                self._outputs.hand_out()
            if self._outputs.outputs and has_next:
                return  # the device has its next step: launching more comes behind handing out
            self._outputs.end()
            scheduler.has_news = False
            self._queues.resume()
            try:
                outcome = scheduler.act(began)
                if outcome is Outcome.STUCK:
                    self._finisher.unblock(is_stuck=True)
                scheduler.has_news |= outcome is Outcome.GOES_ON
            except LaunchError as error:
                self._finisher.launch_failed(error)
        elif not self._launcher.in_flight and not scheduler.rests:
            self._finisher.unblock() if self._requests else catch_up(self._executor, self.timeline)

    def _poll(self) -> None:
        """What is over: its tokens to their requests."""
        try:
            over = self._lanes.poll()
        except DeviceError as error:
            self._finisher.device_failed(error)
            return
        for ticket in over:
            try:
                self._outputs.over(ticket, self._launcher.in_flight.pop(ticket))
            except LaunchError as error:
                self._finisher.launch_failed(error)
        scheduler = self._scheduler
        scheduler.observer.over(over)
        scheduler.has_news = scheduler.has_news or bool(over) or self._lanes.has_room_again()
        now_us, in_flight = self._lanes.device.now_us(), self._launcher.in_flight
        self._watchdog.look(now_us, bool(over), in_flight, self._queues.has_any)

    def _gave_way(self, request: Request, begins_anew: bool) -> None:
        """Pages were short: a request pauses, or begins anew."""
        self._preemptions += 1
        self.timeline.note("preempted", request=request.index, begins_anew=begins_anew)
        if begins_anew:
            self._executor.forget(request)
