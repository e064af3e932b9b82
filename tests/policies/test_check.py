"""What of a policy's answer cannot be carried out, and how it is said."""

from __future__ import annotations

from dataclasses import fields

import pytest

from smkern.errors import ArgumentError, DecisionError
from smkern.policies import Decision, Snapshot, StaticSplit, check
from smkern.policies.check import checked_policy
from smkern.runtime.sim.device import SimDevice
from tests.policies.snapshots import LAYERS, batch, moment, waiting

QUEUE = waiting(1000, 20, 300)
RUNS = moment(waiting=QUEUE, prefill=batch(4096, launched=10), running_kv=(50, 60))
FREE = moment(waiting=QUEUE, running_kv=(50, 60))

LEGAL = {
    "decode alone": (Decision(), FREE),
    "nothing": (Decision(pause_decode=True), FREE),
    "a mixed forward": (Decision(prefill=(0, 1), chunk_tokens=512), FREE),
    "a batch on a split": (Decision(rung=32, prefill=(0,), layers=4), FREE),
    "a batch, its layers later": (Decision(rung=32, prefill=(0,)), FREE),
    "a batch on the whole device": (Decision(prefill=(0,), layers=LAYERS), FREE),
    "layers that are left": (Decision(rung=16, layers=LAYERS - 10), RUNS),
    "a preempting batch": (Decision(rung=16, prefill=(1,), layers=LAYERS, preempt=True), RUNS),
    "two streams": (Decision(prefill=(0,), layers=4, shared=True), FREE),
    "prompts confined, decode around them": (
        Decision(prefill=(0,), layers=4, prefill_rung=32, shared=True),
        FREE,
    ),
    "prompts on all, in turns": (Decision(rung=16, prefill_rung=None, layers=2), RUNS),
    "a hole between the sides": (Decision(rung=16, prefill_rung=48, layers=2), RUNS),
    "asked again": (Decision(pause_decode=True, ask_again_us=500, reason="paced"), FREE),
    "ids in a list": (Decision(prefill=[0, 1]), FREE),  # type: ignore[arg-type]
    "a gang": (Decision(rung=48, layers=1, steps=8, join="gang"), RUNS),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    decision, snapshot = LEGAL[name]
    assert check(decision, snapshot) is decision


TWICE = moment(waiting=QUEUE, prefill=batch(100), preempted=batch(4096, first=200))
FULL = moment(waiting=QUEUE, running_kv=(9,) * 63)

ILLEGAL = {
    "no decision": ("aggregated", FREE, "type str.*return a smkern.policies.Decision"),
    "no such rung": (Decision(rung=20), FREE, r"rung=20.*\[16, 24, 32, 48\].*None"),
    "no rungs": (Decision(rung=16), moment(rungs=()), r"rung=16.*\[\]"),
    "no steps": (Decision(steps=0), FREE, "steps=0.*pause_decode"),
    "steps that are no count": (Decision(steps=1.5), FREE, "steps=1.5"),  # type: ignore[arg-type]
    "negative layers": (Decision(layers=-1), RUNS, "layers=-1"),
    "more layers than are left": (Decision(layers=27), RUNS, "layers=27: 26 of 36"),
    "more layers than there are": (
        Decision(rung=16, prefill=(0,), layers=37),
        FREE,
        "layers=37: 36 of 36",
    ),
    "layers of nothing": (Decision(layers=1), FREE, "layers=1, and no batch"),
    "an empty chunk": (Decision(prefill=(0,), chunk_tokens=0), FREE, "chunk_tokens=0.*1 to 8192"),
    "too large a chunk": (Decision(prefill=(0,), chunk_tokens=8193), FREE, "chunk_tokens=8193"),
    "unknown join": (Decision(join="never"), FREE, "join='never'.*'polled' and 'gang'"),  # type: ignore[arg-type]
    "who does not wait": (Decision(prefill=(0, 9)), FREE, r"\[9\] do not wait"),
    "one twice": (Decision(prefill=(0, 0)), FREE, "twice"),
    "too many": (Decision(prefill=(0, 1, 2)), moment(waiting=QUEUE, max_prefill=2), "holds 2"),
    "more than rows": (Decision(prefill=(0, 1)), FULL, "names 2 requests, and 1 of 64"),
    "a second batch": (Decision(prefill=(0,), layers=1), RUNS, "10 of 36 layers.*set preempt"),
    "chunks beside a batch": (Decision(prefill=(0,)), RUNS, "set preempt"),
    "preempts nothing": (Decision(prefill=(0,), preempt=True), FREE, "no batch runs"),
    "preempts for nobody": (Decision(preempt=True), RUNS, "name the requests"),
    "preempts two deep": (Decision(prefill=(0,), preempt=True), TWICE, "one level at most"),
}


BAD_FIELDS: dict[str, tuple[object, ...]] = {
    "rung": (32.0, "32", True, -1, (16,), float("nan")),
    "prefill_rung": (20, 16.0, "other", False, []),
    "prefill": (None, 0, "0", (None,), (0.0,), ((0,),), {0}),
    "chunk_tokens": (True, 1.5, "all", float("inf")),
    "layers": (None, True, 1.0, float("nan")),
    "steps": (None, True, "2"),
    "join": (None, 1, ["polled"]),
    "preempt": (None, 1, "no"),
    "pause_decode": (None, 0),
    "shared": (None, 1, "yes"),
    "ask_again_us": (0, 1e-9, -1.0, 10**400, float("nan"), float("inf"), True, "1", (1.0,)),
    "reason": (None, 5, b"text"),
}


@pytest.mark.parametrize("field", BAD_FIELDS)
@pytest.mark.parametrize("snapshot", [FREE, RUNS], ids=["free", "runs"])
def test_wrong_types_are_refused_by_name(field: str, snapshot: Snapshot) -> None:
    for value in BAD_FIELDS[field]:
        decision = Decision(**{field: value})  # type: ignore[arg-type]
        with pytest.raises(DecisionError, match=f"^{field}="):
            check(decision, snapshot)


def test_a_bad_field_is_never_missing_here() -> None:
    assert set(BAD_FIELDS) == {field.name for field in fields(Decision)}


def test_a_policy_that_is_none_is_refused() -> None:
    device = SimDevice(132, (16, 48))
    with pytest.raises(ArgumentError, match=r"policy=StaticSplit: a class; make one.*StaticSplit"):
        checked_policy(StaticSplit, device)
    with pytest.raises(ArgumentError, match=r"policy='chunked' of type str has no decide"):
        checked_policy("chunked", device)


def test_a_policy_may_refuse_a_device() -> None:
    class Wide:
        def decide(self, snapshot: Snapshot) -> Decision:
            return Decision()

        def check_device(self, rungs: tuple[int, ...], num_sms: int) -> None:
            if 32 not in rungs:
                raise ArgumentError(f"rung 32 of {rungs} on {num_sms} SMs")

    policy = Wide()
    assert checked_policy(policy, SimDevice(132, (16, 32))) is policy
    with pytest.raises(ArgumentError, match=r"rung 32 of \(16, 48\) on 132 SMs"):
        checked_policy(policy, SimDevice(132, (16, 48)))


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    decision, snapshot, message = ILLEGAL[name]
    with pytest.raises(DecisionError, match=message):
        check(decision, snapshot)  # type: ignore[arg-type]


def test_no_decision_looks_ahead_for_ever() -> None:
    with pytest.raises(DecisionError, match=r"steps=65: at most 64 decode steps"):
        check(Decision(steps=65), moment(running_kv=(40,)))
    with pytest.raises(ArgumentError, match="steps=65: a decision looks ahead at most 64 steps"):
        StaticSplit(32, steps=65)
