"""From a moment to launches: the policy is asked, its decision checked and carried out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from time import perf_counter

from smkern.errors import DecisionError, SmkernError
from smkern.policies import Decision, Policy, Snapshot
from smkern.policies.check import check
from smkern.policies.fallback import fallback
from smkern.policies.snapshot import Trigger
from smkern.runtime.executor import Executor
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.queues import SEEN, RequestQueues
from smkern.runtime.request import Request
from smkern.runtime.timeline.timeline import Timeline

ERRORS = 64
CONTROLS = 4096
PREFILL_AHEAD = 1
"""Groups of layers that may be queued when the next is launched: its stream never runs dry."""


class Outcome(Enum):
    """What came of asking."""

    LAUNCHED = 1
    WAITS = 2
    STUCK = 3
    """There is work, nothing is on its way, and not even a plain decision launches anything."""


class Scheduler:
    """Asks a policy where something can be launched, and launches what it decided.

    Decode steps are launched when the lane has run dry, or, with look-ahead, when its last step
    runs; groups of prefill layers when one is left; decode always first. Where both sides share
    the whole device and a batch is on its way through the layers, they take turns.

    Args:
        policy: Decides.
        executor, lanes, queues, launcher: What is decided about.
        requests: Requests by id.
        timeline: Gets decisions.

    Attributes:
        errors: The last errors of the policy, with their times.
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
        # What stays the same of all moments.
        self._moment = partial(
            Snapshot,
            rungs=executor.device.rungs,
            num_sms=executor.device.num_sms,
            num_layers=executor.config.num_layers,
            page_size=executor.pool.page_size,
            max_running=executor.max_running,
            max_prefill=executor.max_prefill,
            max_tokens=executor.max_tokens,
        )
        self._rung: int | None = None
        # Decode launches that may be queued when the next is decided.
        self._depth = 0
        self._gang = False
        # Both sides on the whole device: the next launch is prefill's.
        self._is_prefills_turn = False

    def act(self, began_s: float) -> Outcome:
        """Ask and launch, where anything can be.

        Args:
            began_s: When the host began this step, by `perf_counter`.

        Raises:
            LaunchError: a launch failed; it names its requests.
        """
        lanes, in_flight = self._lanes, self._launcher.in_flight
        if self._gang and (lanes.queued("decode") or lanes.queued("prefill")):
            return Outcome.WAITS
        self._gang = False
        trigger = self._trigger()
        if trigger is None:
            return Outcome.WAITS
        snapshot = self._snapshot(trigger)
        decision = self._decision(snapshot)
        self._timeline.decided(snapshot, decision)
        launched = self._carry(decision, began_s)
        self._state()
        if launched:
            return Outcome.LAUNCHED
        if in_flight or not self._has_work():
            return Outcome.WAITS
        if not self._carry(fallback(self._snapshot("idle")), perf_counter()):
            return Outcome.STUCK
        if not _asks(decision, snapshot):  # else its requests had no pages, or gave way
            error = DecisionError(
                f"the policy launched nothing while {len(self._queues.waiting)} requests wait, "
                f"{snapshot.batch} decode and nothing is on its way: launch layers, steps or a "
                "chunk"
            )
            self.errors.append((snapshot.now_us, error))
        return Outcome.LAUNCHED

    def _trigger(self) -> Trigger | None:
        """Why the policy is asked now; None: there is nothing to launch, or no room for it."""
        queues = self._queues
        if not self._has_work():
            return None
        if not self._launcher.in_flight:
            return "idle"
        if self._wants_decode() and (queues.running or queues.waiting):
            return "decode"
        return "prefill" if self._wants_prefill() else None

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
            self.errors.append((snapshot.now_us, error))
            self._timeline.note("decision failed", error=str(error))
            return fallback(snapshot)

    def _carry(self, decision: Decision, began_s: float) -> bool:
        """Launch what was decided, decode first; whether anything was."""
        lanes, launcher = self._lanes, self._launcher
        self._rung = decision.rung
        if decision.rung is not None or not decision.layers:
            self._is_prefills_turn = False
        lanes.aim(decision.rung)
        self._depth = 1 if decision.steps > 1 else 0
        ids = decision.prefill
        wanted = [self._requests[id_] for id_ in ids] if ids else []
        tokens = decision.chunk_tokens or self._executor.max_tokens
        layers = decision.layers or (decision.rung is not None)
        launched = is_full = False
        if self._wants_decode() and lanes.can_launch("decode"):
            if wanted and not layers and launcher.batch is None and not lanes.queued("prefill"):
                count = launcher.mixed(wanted, tokens)
                launched, is_full = bool(count), count is None
            if not launched and not is_full and not decision.pause_decode:
                # No more than `steps` are on their way: a request that ends wastes the others.
                count = launcher.decode(decision.steps - lanes.queued("decode"))
                launched = bool(count)
                shares = decision.rung is None and decision.layers > 0
                self._is_prefills_turn = launched and shares
            if launched:
                self.control_us.append(1e6 * (perf_counter() - began_s))
        if layers:
            launched = self._prefill(decision, wanted, tokens) or launched
        self._gang = decision.join == "gang" and launched
        return launched

    def _prefill(self, decision: Decision, wanted: Sequence[Request], tokens: int) -> bool:
        """Begin a batch and launch layers, as decided; whether any were launched."""
        lanes, launcher = self._lanes, self._launcher
        if wanted:  # launching decode may have put one of them back
            wanted = [request for request in wanted if request.stage == "waiting"]
        if wanted and (launcher.batch is None or decision.preempt):
            launcher.begin(wanted, tokens, preempt=decision.preempt)
        if not decision.layers or lanes.queued("prefill") > PREFILL_AHEAD:
            return False
        if not lanes.can_launch("prefill"):
            return False
        launched = launcher.layers(decision.layers) > 0
        self._is_prefills_turn = self._is_prefills_turn and not launched
        return launched

    def _state(self) -> None:
        """What there is to do now, for the timeline."""
        self._timeline.state(
            self._lanes.device.now_us(),
            decoding=len(self._queues.running),
            prefilling=self._launcher.prefilling,
            waiting=len(self._queues.waiting),
        )

    def _snapshot(self, trigger: Trigger) -> Snapshot:
        """This moment, as the policy sees it."""
        queues, launcher = self._queues, self._launcher
        now_us = self._lanes.device.now_us()
        steady = launcher.steady
        if steady is not None:
            lengths, oldest = steady.lengths, steady.token_us
        else:
            running, oldest = queues.running, 0.0
            lengths = tuple([request.num_tokens for request in running])
        if not oldest:
            # A token that is on its way for the first time was never delivered.
            seen = [request.token_us for request in queues.running if request.token_us]
            oldest = min(seen, default=now_us)
        batch, preempted = launcher.batch, launcher.preempted
        return self._moment(
            now_us=now_us,
            trigger=trigger,
            waiting=queues.views(),
            prefill=None if batch is None else batch.view(),
            preempted=None if preempted is None else preempted.view(),
            running_kv=lengths,
            token_age_us=now_us - oldest,
            decode_queued=self._lanes.queued("decode"),
            prefill_queued=self._lanes.queued("prefill"),
            rung=self._rung,
            free_pages=queues.pool.num_available,
            joining=launcher.joining,
            more_waiting=max(0, len(queues.waiting) - SEEN),
        )


def _asks(decision: Decision, snapshot: Snapshot) -> bool:
    """Whether a decision asks for anything to be launched."""
    decodes = bool(snapshot.batch) and not decision.pause_decode
    return decodes or bool(decision.prefill) or decision.layers > 0
