"""Whether a decision can be carried out: the rules that every policy obeys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from smkern.errors import ArgumentError, DecisionError
from smkern.limits import shown
from smkern.policies.decision import Decision, Policy
from smkern.policies.snapshot import Snapshot

JOINS = ("polled", "gang")
MAX_STEPS = 64
"""Decode steps of a decision: a second of them, in which no request joins."""
MOST_US = 1e12
"""A time to be asked again, at most: what is added to a clock stays a number."""


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
        DecisionError: it is none, or a field of it is of a wrong type; it names a rung, a request
            or a batch that is not there, asks for more than the buffers hold, begins a batch where
            one runs, or preempts two deep.

    Example:
        >>> check(Decision(rung=16), snapshot)                                 # doctest: +SKIP
        Traceback (most recent call last):
        smkern.errors.DecisionError: rung=16: this device has the rungs [32, 48]; take one of ...
    """
    if not isinstance(decision, Decision):
        raise DecisionError(
            f"a policy answered {shown(decision)}, of type {type(decision).__name__}: return a "
            "smkern.policies.Decision"
        )
    _check_types(decision)
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
            raise ArgumentError(f"{name}={shown(value)}: give a whole number of at least 1")
        if name == "steps" and value is not None and value > MAX_STEPS:
            raise ArgumentError(f"steps={value}: a decision looks ahead at most {MAX_STEPS} steps")


class Splits(Protocol):
    """What a policy may ask of a device."""

    num_sms: int
    rungs: tuple[int, ...]


def checked_policy(policy: object, device: Splits) -> Policy:
    """A policy, if it can serve on a device.

    Raises:
        ArgumentError: it is none, or names rungs or limits that the device does not have.
    """
    if isinstance(policy, type):
        raise ArgumentError(
            f"policy={policy.__name__}: a class; make one, for instance {policy.__name__}()"
        )
    try:
        decides = callable(policy.decide)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  of whatever it is
        decides = False
    if not decides:
        raise ArgumentError(
            f"policy={shown(policy)} of type {type(policy).__name__} has no decide(snapshot): pass "
            "one of smkern.policies, such as Chunked(), or None for the default"
        )
    check_device = getattr(policy, "check_device", None)
    if check_device is not None:
        check_device(device.rungs, device.num_sms)
    return policy  # type: ignore[return-value]  # it has `decide`


def _check_types(decision: Decision) -> None:
    """Raise DecisionError for a field of a wrong type, whose value no rule could judge."""
    ids = decision.prefill
    if ids != () and not (isinstance(ids, tuple | list) and all(map(_is_count, ids))):
        raise DecisionError(
            f"prefill={shown(ids)}: give a tuple of ids of snapshot.waiting, () for none"
        )
    # Asked about every step: a loop over names takes a microsecond.
    are_bools = type(decision.preempt) is type(decision.pause_decode) is type(decision.shared)
    if not are_bools or type(decision.shared) is not bool:
        for name in ("preempt", "pause_decode", "shared"):
            if not isinstance(getattr(decision, name), bool):
                raise DecisionError(f"{name}={shown(getattr(decision, name))}: give True or False")
    if not isinstance(decision.reason, str):
        raise DecisionError(f"reason={shown(decision.reason)}: give a text")


def _check_rung(name: str, rung: object, snapshot: Snapshot) -> None:
    """Raise DecisionError for a rung that the device does not have; None is the whole device."""
    if rung is not None and not (_is_count(rung) and rung in snapshot.rungs):
        raise DecisionError(
            f"{name}={shown(rung)}: this device has the rungs {list(snapshot.rungs)}; take one of "
            "them, or None for the whole device"
        )


def _check_numbers(decision: Decision, snapshot: Snapshot) -> None:
    """Raise DecisionError for a rung, a count or a join that there is not."""
    _check_rung("rung", decision.rung, snapshot)
    if decision.prefill_rung != "same":
        _check_rung("prefill_rung", decision.prefill_rung, snapshot)
    if not _is_count(decision.steps) or decision.steps < 1:
        raise DecisionError(
            f"steps={shown(decision.steps)}: a decision launches 1 decode step or more; to "
            "launch none, set pause_decode"
        )
    if decision.steps > MAX_STEPS:
        raise DecisionError(
            f"steps={decision.steps}: at most {MAX_STEPS} decode steps are launched at a time; who "
            "comes meanwhile waits for them"
        )
    if not _is_count(decision.layers) or decision.layers < 0:
        raise DecisionError(
            f"layers={shown(decision.layers)}: give a count of layers, or 0 for none"
        )
    most = decision.chunk_tokens
    if most is not None and not (_is_count(most) and 1 <= most <= snapshot.max_tokens):
        raise DecisionError(
            f"chunk_tokens={shown(most)}: the buffers hold 1 to {snapshot.max_tokens} new tokens; "
            "give a count of these, or None for all"
        )
    if decision.join not in JOINS:
        raise DecisionError(
            f"join={shown(decision.join)}: there is {' and '.join(map(repr, JOINS))}"
        )
    again_us = decision.ask_again_us
    if again_us is not None and not _is_time(again_us):
        raise DecisionError(
            f"ask_again_us={shown(again_us)}: give a time of 1 to {MOST_US:g} us, or None to be "
            "asked when something ends"
        )


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MOST_US


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
    unknown = set(ids)
    for waiting in snapshot.waiting:  # mostly the first ones are named
        unknown.discard(waiting.id)
        if not unknown:
            break
    if unknown:
        raise DecisionError(
            f"prefill={list(ids)}: {sorted(unknown)} do not wait; take ids of snapshot.waiting "
            f"({len(snapshot.waiting)} requests)"
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


def fallback(snapshot: Snapshot) -> Decision:
    """What is done where a policy fails: first come, first served on the whole device, a batch that
    is on its way to its end, then chunks beside decode steps."""
    if snapshot.prefill is not None:
        return Decision(layers=snapshot.num_layers - snapshot.prefill.layers_launched)
    ids = tuple(waiting.id for waiting in snapshot.waiting[: snapshot.max_prefill])
    return Decision(prefill=ids)
