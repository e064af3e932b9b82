"""Policies for tests: they follow a script, misbehave, or do anything that is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from smkern.policies import ORDERS, Decision, Snapshot


class Scripted:
    """Decisions one after another; the last one, or what `then` says, for ever.

    A decision may be a function of the snapshot.
    """

    def __init__(self, decisions: Iterable[Any], then: Any = None) -> None:
        self._left = list(decisions)
        self._then = then
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> Any:
        """The next of the script."""
        self.seen.append(snapshot)
        found = self._left.pop(0) if self._left else self._then
        if callable(found):
            found = found(snapshot)
        return Decision() if found is None else found


class Sometimes:
    """Another policy, whose answer is spoiled at some of its turns.

    Args:
        policy: The other.
        spoil: What it does at such a turn: raises, or returns what it likes.
        turns: Which ones, from 0.
    """

    def __init__(self, policy: Any, spoil: Any, turns: Iterable[int]) -> None:
        self._policy = policy
        self._spoil = spoil
        self._turns = set(turns)
        self.order = getattr(policy, "order", "fcfs")
        self.asked = 0

    @property
    def shares(self) -> bool:
        """As the other's."""
        return getattr(self._policy, "shares", False)

    def decide(self, snapshot: Snapshot) -> Any:
        """The other's decision, or a spoiled one."""
        turn, self.asked = self.asked, self.asked + 1
        if turn in self._turns:
            return self._spoil(snapshot)
        return self._policy.decide(snapshot)


class RandomPolicy:
    """Splits, batches, chunks, groups, look-ahead, preemptions, sides that are shared and times to
    be asked again drawn at random, all legal, in an order that is.

    Args:
        seed: Seed of the draws.
        idle: How often it decides to do less than it could.
        preempt: How often a running batch is preempted where it may be.
        stay: How often it stays on the rung that it has.
        free: How often a side has another rung than the other, or shares SMs with it.
        again: How often it wants to be asked again after a time.
    """

    def __init__(
        self,
        seed: int,
        *,
        idle: float = 0.15,
        preempt: float = 0.3,
        stay: float = 0.6,
        free: float = 0.0,
        again: float = 0.0,
    ) -> None:
        self._random = Random(seed)
        self._idle = idle
        self._preempt = preempt
        self._stay = stay
        self._free = free
        self._again = again
        self._other = Random(f"{seed} of sides")  # the others are drawn as if there were none
        self.order = self._other.choice(sorted(ORDERS)) if free else "fcfs"
        self.shares = False
        """Whether the last decision let the sides overlap."""
        self.asked = 0

    def decide(self, snapshot: Snapshot) -> Decision:
        """Anything that may be done now."""
        self.asked += 1
        draw = self._random
        self.shares = self._other.random() < self._free
        rung = snapshot.rung
        if draw.random() > self._stay:
            rung = draw.choice([None, *snapshot.rungs])
        preempt = (
            snapshot.prefill is not None
            and snapshot.preempted is None
            and draw.random() < self._preempt
        )
        ids: tuple[int, ...] = ()
        if (snapshot.prefill is None or preempt) and not self._rests():
            ids = self._batch(snapshot)
        return Decision(
            rung=rung,
            prefill=ids,
            chunk_tokens=self._chunk(snapshot),
            layers=self._layers(snapshot, bool(ids)),
            steps=draw.randint(1, 8),
            join="gang" if self._rests() else "polled",
            preempt=preempt and bool(ids),
            pause_decode=self._rests(),
            prefill_rung=self._prefill_rung(snapshot),
            shared=self.shares,
            ask_again_us=self._time(),
            reason="drawn",
        )

    def _prefill_rung(self, snapshot: Snapshot) -> Any:
        """A rung of its own for the prompts' layers."""
        if self._other.random() >= self._free:
            return "same"
        return self._other.choice([None, *snapshot.rungs])

    def _time(self) -> float | None:
        if self._other.random() >= self._again:
            return None
        return self._other.choice([1, 3.5, 40.0, 900.0])

    def _rests(self) -> bool:
        return self._random.random() < self._idle

    def _batch(self, snapshot: Snapshot) -> tuple[int, ...]:
        """Some of those that wait; mostly the first ones."""
        taken = snapshot.batch + sum(
            len(batch.ids) for batch in (snapshot.prefill, snapshot.preempted) if batch is not None
        )
        most = min(snapshot.max_prefill, snapshot.max_running - taken, len(snapshot.waiting))
        if most < 1:
            return ()
        ids = [waiting.id for waiting in snapshot.waiting]
        if self._random.random() < 0.3:
            self._random.shuffle(ids)
        return tuple(ids[: self._random.randint(1, most)])

    def _chunk(self, snapshot: Snapshot) -> int | None:
        if self._random.random() < 0.4:
            return None
        return self._random.randint(1, snapshot.max_tokens)

    def _layers(self, snapshot: Snapshot, begins: bool) -> int:
        left = snapshot.num_layers
        if not begins:
            if snapshot.prefill is None:
                return 0
            left -= snapshot.prefill.layers_launched
        if left < 1 or self._rests():
            return 0
        return self._random.randint(1, left)
