"""A greedy oracle: what a policy could gain that tried each way for a second before it chose.

It tries by forking: a child serves on from the very moment, launches' times of the future included,
tells by a pipe what came of it, and ends.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from math import inf
from typing import NoReturn

from smkern.policies import Decision, Policy, Snapshot
from smkern.policies.adaptive import FIRST_AIMS
from smkern.policies.lateness import Lateness
from smkern.replay import Served, SimServer
from smkern.replay.simulated import SimSession

ORACLE = "oracle"
HORIZON_S = 1.0
"""Of a trial, and of what is chosen by it."""
LATE = 0.009
"""Share of late tokens under which ways are compared by prompts alone."""
_SCORE = struct.Struct("dd")


class Oracle:
    """The best of some policies, tried anew every second.

    Best is which has computed most tokens of prompts after a second, layer by layer, among those
    that keep tokens in time; where none does, which is late least often. Policies change where no
    batch of prompts is on its way.

    Args:
        policies: What is tried; they have one order.
        tbt_slo_ms: Limit of gaps.

    Attributes:
        chosen: The policy of each second, by its place.
    """

    def __init__(self, policies: Sequence[Policy], *, tbt_slo_ms: float) -> None:
        self._policies = policies
        self.order = getattr(policies[0], "order", "fcfs")
        self._limit_us = 1e3 * tbt_slo_ms
        self._lateness = Lateness(self._limit_us, LATE, dict.fromkeys(FIRST_AIMS, 1.0))
        self._active = policies[0]
        self._until_us = 0.0
        self._tokens = 0.0
        self._pipe: int | None = None
        self.chosen: list[int] = []

    def decide(self, snapshot: Snapshot) -> Decision:
        """What the best does."""
        self._lateness.see(snapshot.ended, snapshot.num_sms)
        self._tokens += sum(x.size.new_tokens * x.size.layers for x in snapshot.ended)
        if snapshot.now_us >= self._until_us:
            if self._pipe is not None:
                # Rows that wait too long already are late, however many tokens came in time before.
                self.tell(is_late=snapshot.token_age_us > self._limit_us)
            if snapshot.prefill is None and snapshot.waiting:
                self._choose(snapshot.now_us)
        return self._active.decide(snapshot)

    def _choose(self, now_us: float) -> None:
        self._until_us = now_us + 1e6 * HORIZON_S
        scores = []
        for policy in self._policies:
            score = self._tried(policy)
            if score is None:  # a child: it goes on with this one
                return
            scores.append(score)
        best = max(range(len(scores)), key=lambda n: scores[n])
        self.chosen.append(best)
        self._active = self._policies[best]

    def _tried(self, policy: Policy) -> tuple[float, float] | None:
        """What came of a trial: (late beyond what is allowed, negative; prompts done)."""
        theirs, ours = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(theirs)
            self._pipe, self._active = ours, policy
            return None
        os.close(ours)
        with os.fdopen(theirs, "rb") as pipe:
            told = pipe.read()
        os.waitpid(pid, 0)
        if len(told) != _SCORE.size:
            return -inf, -inf
        late, tokens = _SCORE.unpack(told)
        return -max(late - LATE, 0.0), tokens

    @property
    def is_trial(self) -> bool:
        """Whether this is a child, which ends with `tell`."""
        return self._pipe is not None

    def tell(self, *, is_late: bool = False) -> NoReturn:
        """End a trial."""
        assert self._pipe is not None
        late = 1.0 if is_late else self._lateness.share
        os.write(self._pipe, _SCORE.pack(late, self._tokens))
        os._exit(0)


class OracleServer(SimServer):
    """A simulated server that ends trials where their replay does."""

    def open(self, policy: Policy, *, keep: bool = False) -> SimSession:
        session = super().open(policy, keep=keep)
        close = session.close

        def closed(served: Served, live: Sequence[int]) -> None:
            if isinstance(policy, Oracle) and policy.is_trial:
                policy.tell()
            close(served, live)

        session.close = closed  # type: ignore[method-assign]
        return session
