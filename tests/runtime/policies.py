"""Policies for tests that follow a script, or misbehave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.runtime.random_policy import RandomPolicy
from smkern.policies import Decision, Snapshot

__all__ = ["RandomPolicy", "Scripted", "Sometimes"]


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
        self.asked = 0

    def decide(self, snapshot: Snapshot) -> Any:
        """The other's decision, or a spoiled one."""
        turn, self.asked = self.asked, self.asked + 1
        if turn in self._turns:
            return self._spoil(snapshot)
        return self._policy.decide(snapshot)
