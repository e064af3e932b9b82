"""From a moment to launches: the policy is asked, its decision checked and carried out."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from time import perf_counter

from smkern.errors import DecisionError, SmkernError
from smkern.limits import shown
from smkern.policies import Decision, Policy, Snapshot
from smkern.policies.check import check, fallback
from smkern.policies.snapshot import Trigger
from smkern.runtime.executor import Executor
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.moment import Observer
from smkern.runtime.queues import RequestQueues
from smkern.runtime.request import Request
from smkern.runtime.timeline.timeline import Timeline

ERRORS = 64
CONTROLS = 4096
PREFILL_AHEAD = 1
"""Groups of layers that may be queued when the next is launched: its stream never runs dry."""
MOST_REST_US = 1e5
"""A policy may let the device idle for so long while there is work: then something is launched."""


class Outcome(Enum):
    """What came of asking."""

    LAUNCHED = 1
    GOES_ON = 4
    """Another may be launched at once: behind a mixed forward, or layers beside a decode step whose
    tokens are to be handed out first."""
    WAITS = 2
    STUCK = 3
    """There is work, nothing is on its way, and not even a plain decision launches anything."""


class Scheduler:
    """Asks a policy where something can be launched, and launches what it decided.

    Decode steps are launched when the lane has run dry, or, with look-ahead, when its last step
    runs; groups of prefill layers when one is left; decode always first. Where the sides overlap
    and may not run at once, and a batch is on its way through the layers, they take turns.

    Attributes:
        errors: The last errors of the policy, with their times.
        observer: Makes snapshots.
        has_news: Whether anything has come, ended or become free since the policy was asked.
        steady_steps: Steps of the last decision, where there was nothing but decode and it was
            plain; else 0.
        control_us: Host time from `began` to the launch of decode, of the last such acts.
    """

    def __init__(
        self,
        policy: Policy,
        executor: Executor,
        lanes: Interleaver,
        queues: RequestQueues,
        launcher: BatchLauncher,
        requests: Mapping[int, Request],
        timeline: Timeline,
    ) -> None:
        self.errors: deque[tuple[float, SmkernError]] = deque(maxlen=ERRORS)
        self.control_us: deque[float] = deque(maxlen=CONTROLS)
        self._policy = policy
        self._executor = executor
        self._lanes = lanes
        self._queues = queues
        self._launcher = launcher
        self._requests = requests
        self._timeline = timeline
        self.observer = Observer(executor, lanes, queues, launcher)
        self.steady_steps = 0
        self.has_news = False
        self._rung: int | None = None
        # What the lanes are aimed at, and whether they take turns there.
        self._aimed: tuple[int | None, int | str | None, bool] = None, "same", False
        self._overlap = True
        # Decode launches that may be queued when the next is decided.
        self._depth = 0
        self._gang = False
        # Layers were decided on, or a batch begun, and they wait until tokens are handed out.
        self._layers_wait = False
        # The sides overlap: the next launch is prefill's.
        self._is_prefills_turn = False
        # When the policy wants to be asked again, and since when it lets the device idle.
        self._again_us: float | None = None
        self._rests_since_us: float | None = None
        self._has_warned = False

    @property
    def again_us(self) -> float | None:
        """When the policy wants to be asked, whatever ends; None: when something does."""
        return None if self._again_us is None or self._gang_runs() else self._again_us

    @property
    def is_due(self) -> bool:
        """Whether that time has come."""
        again_us = self.again_us
        return again_us is not None and self._lanes.device.now_us() >= again_us

    @property
    def rests(self) -> bool:
        """Whether nothing is launched because the policy wants to be asked later."""
        return self._rests_since_us is not None

    def report(self, error: SmkernError) -> None:
        """Keep an error of the policy; the first one is a warning."""
        self.errors.append((self._lanes.device.now_us(), error))
        self._timeline.note("decision failed", error=str(error))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the policy {shown(self._policy)} failed, and a plain decision was carried out "
                f"instead ({type(error).__name__}: {error}); Multiplexer.errors has this one and "
                "those that follow",
                RuntimeWarning,
                stacklevel=2,
            )

    def act(self, began_s: float) -> Outcome:
        """Ask and launch, where anything can be; `began_s` is when the host began this step.

        Raises:
            LaunchError: a launch failed; it names its requests.
        """
        in_flight = self._launcher.in_flight
        if self._gang_runs():
            return Outcome.WAITS
        self._gang = False
        trigger = self._trigger()
        if trigger is None:
            return Outcome.WAITS
        self._launcher.make_way()
        snapshot = self.observer.look(trigger, self._rung)
        decision = self._decision(snapshot)
        self._timeline.decided(snapshot, decision)
        again_us = decision.ask_again_us
        self._again_us = None if again_us is None else snapshot.now_us + again_us
        launched = self._carry(decision, began_s)
        self.steady_steps = decision.steps if _is_steady(snapshot, decision) else 0
        self._state()
        if launched:
            self._rests_since_us = None
            goes_on = self._launcher.mixes and self._wants_decode()
            return Outcome.GOES_ON if goes_on or self._layers_wait else Outcome.LAUNCHED
        if in_flight or not self._has_work() or self._may_rest(snapshot.now_us):
            return Outcome.WAITS
        self._again_us = self._rests_since_us = None
        if not self._carry(fallback(self.observer.look("idle", self._rung)), perf_counter()):
            return Outcome.STUCK
        if not _asks(decision, snapshot):  # else its requests had no pages, or gave way
            error = DecisionError(
                f"the policy launched nothing while {len(snapshot.waiting)} requests wait, "
                f"{snapshot.batch} decode and nothing is on its way: launch layers, steps or a "
                "chunk"
            )
            self.report(error)
        return Outcome.LAUNCHED

    def _gang_runs(self) -> bool:
        """Whether both sides wait for each other."""
        lanes = self._lanes
        return self._gang and bool(lanes.queued("decode") or lanes.queued("prefill"))

    def _may_rest(self, now_us: float) -> bool:
        """Whether nothing is launched, since the policy wants it so for a while."""
        if self._again_us is None:
            return False
        if self._rests_since_us is None:
            self._rests_since_us = now_us
        end_us = self._rests_since_us + MOST_REST_US
        if now_us >= end_us:
            return False
        self._again_us = min(self._again_us, end_us)
        return True

    def _trigger(self) -> Trigger | None:
        """Why the policy is asked now; None: there is nothing to launch, or no room for it."""
        queues = self._queues
        if not self._has_work():
            self._again_us = self._rests_since_us = None
            return None
        if not self._launcher.in_flight:
            return "timer" if self.is_due else "idle"
        if self._wants_decode() and (queues.running or queues.waiting):
            return "decode"
        if self._wants_prefill():
            return "prefill"
        return "timer" if self.is_due else None

    def _has_work(self) -> bool:
        queues = self._queues
        return bool(queues.running or queues.waiting or self._launcher.batch)

    def _wants_decode(self) -> bool:
        """Whether the decode lane has room for another launch, and it is its turn."""
        if self._is_prefills_turn and self._launcher.batch is not None:
            return False
        return self._lanes.queued("decode") <= self._depth

    def _wants_prefill(self) -> bool:
        """Whether the prefill lane has room, and there is something for it."""
        if self._launcher.batch is None and not self._queues.waiting:
            return False
        return self._lanes.queued("prefill") <= PREFILL_AHEAD

    def _decision(self, snapshot: Snapshot) -> Decision:
        """The policy's, or a plain one where it fails."""
        try:
            return check(self._policy.decide(snapshot), snapshot)
        except Exception as reason:  # noqa: BLE001  whatever a policy raises is reported
            error = reason
            if not isinstance(error, DecisionError):
                error = DecisionError(f"the policy raised {type(reason).__name__}: {reason}")
            self.report(error)
            return fallback(snapshot)

    def _carry(self, decision: Decision, began_s: float) -> bool:
        """Launch what was decided, decode first; whether anything was."""
        lanes, launcher = self._lanes, self._launcher
        self._rung = decision.rung
        takes_turns = self._aim(decision)
        if not takes_turns:
            self._is_prefills_turn = False
        self._depth = 1 if decision.steps > 1 else 0
        ids = decision.prefill
        wanted = [self._requests[id_] for id_ in ids] if ids else []
        tokens = decision.chunk_tokens or self._executor.max_tokens
        layers = decision.layers or (decision.rung is not None)
        launched = is_full = False
        was_dry = not lanes.queued("decode")
        if self._wants_decode() and lanes.can_launch("decode"):
            if wanted and not layers and launcher.batch is None and not lanes.queued("prefill"):
                count = launcher.mixed(wanted, tokens)
                launched, is_full = bool(count), count is None
            if not launched and not is_full and not decision.pause_decode:
                # No more than `steps` are on their way: a request that ends wastes the others.
                count = launcher.decode(decision.steps - lanes.queued("decode"))
                launched = bool(count)
                self._is_prefills_turn = launched and takes_turns
            if launched:
                self.control_us.append(1e6 * (perf_counter() - began_s))
        is_beside = decision.join == "polled" and not takes_turns
        has_waited = self._layers_wait  # once: a step may be over before its tokens are
        self._layers_wait = bool(layers and was_dry and launched and is_beside) and not has_waited
        if layers and not self._layers_wait:
            has_begun = self._begins(decision, wanted, tokens)
            if has_begun and is_beside and lanes.queued("decode"):
                # The host took as long for it as for the layers of a group.
                self._layers_wait = launched = True
            else:
                launched = self._launches_layers(decision) or launched
        self._gang = decision.join == "gang" and launched
        return launched

    def _aim(self, decision: Decision) -> bool:
        """Say where the lanes shall run; whether they take turns there."""
        # Layers that begin while a mixed forward runs would write the buffers that it uses.
        shared = decision.shared and not self._launcher.mixes
        aimed = decision.rung, decision.prefill_rung, shared
        if aimed != self._aimed:
            rung, prefill, _ = self._aimed = aimed
            lanes = self._lanes
            lanes.aim(rung, prefill=rung if prefill == "same" else prefill, shared=shared)
            overlap = lanes.target("decode").overlaps(lanes.target("prefill"))
            self._overlap = overlap and not lanes.shared
        return self._overlap and decision.layers > 0

    def _begins(self, decision: Decision, wanted: Sequence[Request], tokens: int) -> bool:
        """Whether a batch begins, as decided."""
        # Launching decode may have put one of them back.
        wanted = [request for request in wanted if request.stage == "waiting"]
        if not wanted or (self._launcher.batch is not None and not decision.preempt):
            return False
        return self._launcher.begin(wanted, tokens, preempt=decision.preempt)

    def _launches_layers(self, decision: Decision) -> bool:
        """Whether layers of the batch are launched, as decided."""
        lanes = self._lanes
        if not decision.layers or lanes.queued("prefill") > PREFILL_AHEAD:
            return False
        if not lanes.can_launch("prefill"):
            return False
        launched = self._launcher.layers(decision.layers) > 0
        self._is_prefills_turn = self._is_prefills_turn and not launched
        return launched

    def _state(self) -> None:
        self._timeline.state(
            self._lanes.device.now_us(),
            decoding=len(self._queues.running),
            prefilling=self._launcher.prefilling,
            waiting=len(self._queues.waiting),
        )


def _is_steady(snapshot: Snapshot, decision: Decision) -> bool:
    """Whether there was nothing but decode, and the decision was to go on with it."""
    others = snapshot.waiting or snapshot.prefill or snapshot.joining or snapshot.prefill_queued
    if others or decision.layers or decision.prefill or decision.pause_decode:
        return False
    return decision.join == "polled" and decision.ask_again_us is None


def _asks(decision: Decision, snapshot: Snapshot) -> bool:
    decodes = bool(snapshot.batch) and not decision.pause_decode
    return decodes or bool(decision.prefill) or decision.layers > 0
