"""Whether a decision can be carried out: the rules that every policy obeys."""

from __future__ import annotations

from collections.abc import Mapping

from smkern.errors import ArgumentError, DecisionError
from smkern.policies.decision import Decision
from smkern.policies.snapshot import Snapshot

JOINS = ("polled", "gang")
MAX_STEPS = 64
"""Decode steps of a decision: a second of them, in which no request joins."""


def check(decision: Decision, snapshot: Snapshot) -> Decision:
    """A decision, if it can be carried out at a moment.

    Pages are not looked at: where they are short, fewer steps are launched and fewer requests are
    admitted.

    Args:
        decision: What a policy answered.
        snapshot: What it was asked about.

    Returns:
        The decision.

    Raises:
        DecisionError: it is none, names a rung, a request or a batch that is not there, asks for
            more than the buffers hold, begins a batch where one runs, or preempts two deep.

    Example:
        >>> check(Decision(rung=16), snapshot)                                 # doctest: +SKIP
        Traceback (most recent call last):
        smkern.errors.DecisionError: rung=16: this device has the rungs [32, 48]; take one of ...
    """
    if not isinstance(decision, Decision):
        raise DecisionError(
            f"a policy answered {decision!r:.80}, of type {type(decision).__name__}: return a "
            "smkern.policies.Decision"
        )
    _check_numbers(decision, snapshot)
    if decision.preempt:
        _check_preempts(decision, snapshot)
    if decision.prefill:
        _check_begins(decision, snapshot)
    _check_layers(decision, snapshot)
    return decision


def rows_left(snapshot: Snapshot) -> int:
    """Requests whose prefill may begin, so that each has a decode row when it is over."""
    taken = snapshot.batch + snapshot.joining
    for batch in (snapshot.prefill, snapshot.preempted):
        taken += len(batch.ids) if batch is not None else 0
    return max(snapshot.max_running - taken, 0)


def check_counts(counts: Mapping[str, int | None]) -> None:
    """Raise ArgumentError for a policy's setting that no decision may have; None is left."""
    for name, value in counts.items():
        if value is not None and not (_is_count(value) and value >= 1):
            raise ArgumentError(f"{name}={value!r}: give a whole number of at least 1")
        if name == "steps" and value is not None and value > MAX_STEPS:
            raise ArgumentError(f"steps={value}: a decision looks ahead at most {MAX_STEPS} steps")


def _check_numbers(decision: Decision, snapshot: Snapshot) -> None:
    """Raise DecisionError for a rung, a count or a join that there is not."""
    if decision.rung is not None and decision.rung not in snapshot.rungs:
        raise DecisionError(
            f"rung={decision.rung}: this device has the rungs {list(snapshot.rungs)}; take one of "
            "them, or None for the whole device"
        )
    if not _is_count(decision.steps) or decision.steps < 1:
        raise DecisionError(
            f"steps={decision.steps}: a decision launches 1 decode step or more; to launch none, "
            "set pause_decode"
        )
    if decision.steps > MAX_STEPS:
        raise DecisionError(
            f"steps={decision.steps}: at most {MAX_STEPS} decode steps are launched at a time; who "
            "comes meanwhile waits for them"
        )
    if not _is_count(decision.layers) or decision.layers < 0:
        raise DecisionError(f"layers={decision.layers}: give a count of layers, or 0 for none")
    most = decision.chunk_tokens
    if most is not None and not (_is_count(most) and 1 <= most <= snapshot.max_tokens):
        raise DecisionError(
            f"chunk_tokens={most}: the buffers hold 1 to {snapshot.max_tokens} new tokens; give a "
            "count of these, or None for all"
        )
    if decision.join not in JOINS:
        raise DecisionError(f"join={decision.join!r}: there is {' and '.join(map(repr, JOINS))}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_preempts(decision: Decision, snapshot: Snapshot) -> None:
    """Raise DecisionError unless a batch runs that may be preempted by another."""
    if snapshot.prefill is None:
        raise DecisionError("preempt=True, and no batch runs: begin it without preempt")
    if snapshot.preempted is not None:
        raise DecisionError(
            f"preempt=True, and the running batch {list(snapshot.prefill.ids)} has preempted "
            f"{list(snapshot.preempted.ids)} already: one level at most; wait until it is over"
        )
    if not decision.prefill:
        raise DecisionError("preempt=True with prefill=(): name the requests that go first")


def _check_begins(decision: Decision, snapshot: Snapshot) -> None:
    """Raise DecisionError unless these requests wait and may begin now."""
    ids = decision.prefill
    known = {waiting.id for waiting in snapshot.waiting}
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise DecisionError(
            f"prefill={list(ids)}: {unknown} do not wait; take ids of snapshot.waiting "
            f"({len(known)} requests)"
        )
    if len(set(ids)) < len(ids):
        raise DecisionError(f"prefill={list(ids)} names a request twice; name each once")
    if len(ids) > snapshot.max_prefill:
        raise DecisionError(
            f"prefill names {len(ids)} requests, and a batch holds {snapshot.max_prefill}; name "
            "fewer, or set max_prefill of the executor"
        )
    if len(ids) > rows_left(snapshot):
        raise DecisionError(
            f"prefill names {len(ids)} requests, and {rows_left(snapshot)} of "
            f"{snapshot.max_running} decode rows are left; name fewer, or set max_running of the "
            "executor"
        )
    if snapshot.prefill is not None and not decision.preempt:
        raise DecisionError(
            f"prefill={list(ids)} while the batch {list(snapshot.prefill.ids)} runs "
            f"({snapshot.prefill.layers_launched} of {snapshot.num_layers} layers launched): "
            "launch its layers first, or set preempt"
        )


def _check_layers(decision: Decision, snapshot: Snapshot) -> None:
    """Raise DecisionError for more layers than the batch that they are of has left."""
    if not decision.layers:
        return
    left = snapshot.num_layers
    if not decision.prefill:
        if snapshot.prefill is None:
            raise DecisionError(
                f"layers={decision.layers}, and no batch runs or begins: name requests in prefill, "
                "or give layers=0"
            )
        left -= snapshot.prefill.layers_launched
    if decision.layers > left:
        raise DecisionError(
            f"layers={decision.layers}: {left} of {snapshot.num_layers} layers of the batch are "
            "not launched yet; give at most so many"
        )
