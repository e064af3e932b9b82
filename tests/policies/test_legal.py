"""Whatever the moment, what the policies answer can be carried out, and work goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.errors import ArgumentError
from smkern.policies import (
    ORDERS,
    POLICIES,
    Adaptive,
    Bullet,
    Chunked,
    Decision,
    Drift,
    DuetServe,
    MuxWise,
    Policy,
    PrefillFirst,
    Snapshot,
    StaticSplit,
    Temporal,
    TwoStreams,
    check,
)
from smkern.policies.admission import growth_pages
from smkern.policies.check import rows_left
from tests.latency.simple import Linear
from tests.policies.snapshots import IDLE, RUNGS, snapshots

pytestmark = pytest.mark.slow


LIMITS = (0.001, 5.0, 20.0, 1e6)
GOES_ON = (Chunked, MuxWise, StaticSplit, TwoStreams)
"""Those that never let a lane wait that has room."""
REORDERS = (Bullet,)
WITH_MARGIN = (Bullet, Chunked, Drift, DuetServe, MuxWise, Temporal)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    made = draw(st.sampled_from(tuple(POLICIES.values())))
    predictor = draw(st.sampled_from((None, Linear())))
    limits: dict[str, Any] = {
        "ttft_slo_ms": draw(st.sampled_from((None, 1.0, 1000.0))),
        "order": draw(st.sampled_from(tuple(ORDERS))),
    }
    if made in (Adaptive, DuetServe, Drift, MuxWise, Bullet):
        return made(Linear(), tbt_slo_ms=draw(st.sampled_from(LIMITS)), **limits)
    limit = None if predictor is None else draw(st.sampled_from((None, *LIMITS)))
    limits |= {"predictor": predictor, "tbt_slo_ms": limit}
    if made is Chunked:
        return Chunked(draw(st.none() | st.integers(1, 10_000)), **limits)
    if made is PrefillFirst:
        return PrefillFirst(**limits)
    tokens = draw(st.sampled_from((1, 500, 8192, 100_000)))
    steps = draw(st.integers(1, 8))
    if made is not StaticSplit:
        return made(max_prefill_tokens=tokens, steps=steps, **limits)
    return StaticSplit(
        draw(st.sampled_from((None, *RUNGS))),
        layers=draw(st.none() | st.integers(1, 40)),
        steps=steps,
        max_prefill_tokens=tokens,
        preempt_shorter_than=draw(st.none() | st.integers(1, 5000)),
        move=draw(st.booleans()),
        decode_shares=draw(st.booleans()),
        join=draw(st.sampled_from(("polled", "gang"))),
        **limits,
    )


@pytest.mark.parametrize("made", WITH_MARGIN)
@settings(max_examples=40)
@given(moments=st.lists(snapshots(), min_size=1, max_size=4))
def test_a_margin_plans_for_a_shorter_limit(made: Any, moments: list[Snapshot]) -> None:
    careful = made(predictor=Linear(), tbt_slo_ms=20.0, margin=0.25)
    shorter = made(predictor=Linear(), tbt_slo_ms=15.0)
    assert "tbt_slo_ms=20, " in repr(careful)
    assert repr(careful).endswith("margin=0.25)")
    for snapshot in moments:
        assert careful.decide(snapshot) == shorter.decide(snapshot)


@pytest.mark.parametrize("made", WITH_MARGIN)
@pytest.mark.parametrize("margin", [-0.1, 1.0, "x"])
def test_a_margin_is_a_share(made: Any, margin: Any) -> None:
    with pytest.raises(ArgumentError, match="margin="):
        made(predictor=Linear(), tbt_slo_ms=20.0, margin=margin)


@settings(max_examples=150)
@given(policies(), st.lists(snapshots(), min_size=1, max_size=4))
def test_decisions_are_legal_and_go_on(policy: Any, moments: list[Snapshot]) -> None:
    for snapshot in moments:
        decision = check(policy.decide(snapshot), snapshot)
        if policy.splits == "never":
            assert decision.rung is None
            assert decision.prefill_rung in (None, "same")
        assert takes_what_fits(decision, snapshot, in_order=not isinstance(policy, REORDERS))
        if isinstance(policy, GOES_ON):
            assert goes_on(decision, snapshot)
        if not snapshot.decode_queued and not snapshot.prefill_queued:
            assert does_something(decision, snapshot)


@given(policies(), st.lists(snapshots(), min_size=2, max_size=3))
def test_alone_decode_goes_on_as_it_did(policy: Policy, moments: list[Snapshot]) -> None:
    """What they promise by `decodes_alone_steadily`: simulations do not ask them then."""
    if not getattr(policy, "decodes_alone_steadily", False):
        return
    alone = [
        replace(one, waiting=(), prefill=None, preempted=None, joining=0, prefill_queued=0)
        for one in moments
    ]
    assert len({policy.decide(one) for one in alone}) == 1


def does_something(decision: Decision, snapshot: Snapshot) -> bool:
    """Where nothing runs and something can, it does."""
    can = bool(snapshot.batch) or first_fits(snapshot)
    if snapshot.prefill is not None:
        can = can or snapshot.prefill.layers_launched < snapshot.num_layers
    decodes = bool(snapshot.batch) and not decision.pause_decode
    return not can or decodes or bool(decision.prefill) or decision.layers > 0


def goes_on(decision: Decision, snapshot: Snapshot) -> bool:
    """Decode is never paused, and what may run on the prefill lane does."""
    if decision.pause_decode:
        return False
    if snapshot.prefill_queued > 1:
        return True
    if snapshot.prefill is not None:
        left = snapshot.num_layers - snapshot.prefill.layers_launched
        return decision.layers > 0 or left == 0
    return bool(decision.prefill) == first_fits(snapshot)


def first_fits(snapshot: Snapshot) -> bool:
    """Whether the first that waits may begin where no batch runs."""
    first = snapshot.waiting[0] if snapshot.waiting and snapshot.prefill is None else None
    return (
        first is not None
        and rows_left(snapshot) > 0
        and first.pages <= snapshot.free_pages - growth_pages(snapshot)
    )


def takes_what_fits(decision: Decision, snapshot: Snapshot, *, in_order: bool) -> bool:
    """Pages and rows are there; without preemption, the first are taken, in their order."""
    names = [request.id for request in snapshot.waiting]
    pages = {request.id: request.pages for request in snapshot.waiting}
    taken = list(decision.prefill)
    in_order = not in_order or decision.preempt or taken == names[: len(taken)]
    return in_order and sum(pages[name] for name in taken) <= snapshot.free_pages


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_to_do(name: str) -> None:
    policy = POLICIES[name](predictor=Linear(), tbt_slo_ms=10.0)
    decision = check(policy.decide(IDLE), IDLE)
    assert not decision.prefill
    assert decision.layers == 0
    assert decision.rung is None


@pytest.mark.parametrize("name", POLICIES)
def test_all_take_the_same_settings_and_show_them(name: str) -> None:
    made = POLICIES[name]
    policy = made(predictor=Linear(), tbt_slo_ms=12.5, ttft_slo_ms=800.0, order="slack")
    assert policy.order is ORDERS["slack"]
    assert repr(policy).startswith(f"{made.__name__}(")
    assert "order='slack'" in repr(policy)
    for setting in ({"tbt_slo_ms": 0.0}, {"ttft_slo_ms": -1.0}, {"tbt_slo_ms": "12"}):
        with pytest.raises(ArgumentError, match=next(iter(setting))):
            made(**{"predictor": Linear(), "tbt_slo_ms": 12.5, **setting})
    with pytest.raises(ArgumentError, match="order='last'"):
        made(predictor=Linear(), tbt_slo_ms=12.5, order="last")
    with pytest.raises(ArgumentError, match="predictor=7, of type int"):
        made(predictor=7, tbt_slo_ms=12.5)


@pytest.mark.parametrize("name", ["adaptive", "duetserve", "drift", "muxwise", "bullet"])
def test_what_splits_by_a_limit_needs_both(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"tbt_slo_ms=None.*give both"):
        POLICIES[name](predictor=Linear())
    with pytest.raises(ArgumentError, match="without a predictor"):
        POLICIES[name](tbt_slo_ms=12.5)


@pytest.mark.parametrize("name", ["static_split", "duetserve", "drift", "muxwise", "bullet"])
def test_what_splits_refuses_a_device_without_rungs(name: str) -> None:
    policy = POLICIES[name](predictor=Linear(), tbt_slo_ms=12.5)
    policy.check_device(RUNGS, 132)
    with pytest.raises(ArgumentError, match=r"this one has no rungs.*or take Chunked"):
        policy.check_device((), 132)


def test_a_rung_that_the_device_does_not_have() -> None:
    StaticSplit(24).check_device(RUNGS, 132)
    with pytest.raises(ArgumentError, match=r"StaticSplit\(25\): this device has the rungs \[16"):
        StaticSplit(25).check_device(RUNGS, 132)


@pytest.mark.parametrize(
    "name", ["adaptive", "chunked", "temporal", "duetserve", "drift", "muxwise", "bullet"]
)
def test_a_limit_that_one_request_exceeds_by_itself(name: str) -> None:
    # 1,010 us * 100 / 132.
    POLICIES[name](predictor=Linear(), tbt_slo_ms=0.77).check_device(RUNGS, 132)
    policy = POLICIES[name](predictor=Linear(), tbt_slo_ms=0.76)
    with pytest.raises(ArgumentError, match=r"tbt_slo_ms=0.76: .*takes 0.77 ms on all 132 SMs"):
        policy.check_device(RUNGS, 132)
