"""Whatever the moment, what the policies answer can be carried out, and work goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.policies import Chunked, Decision, Policy, Snapshot, StaticSplit, check
from smkern.policies.admission import growth_pages
from smkern.policies.check import rows_left
from tests.latency.simple import Linear
from tests.policies.snapshots import RUNGS, snapshots

pytestmark = pytest.mark.slow


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    predictor = draw(st.sampled_from((None, Linear())))
    if draw(st.booleans()):
        limit = None if predictor is None else draw(st.sampled_from((None, 0.001, 5.0, 20.0, 1e6)))
        return Chunked(draw(st.integers(1, 10_000)), limit, predictor)
    return StaticSplit(
        draw(st.sampled_from(RUNGS)),
        layers=draw(st.none() | st.integers(1, 40)),
        steps=draw(st.integers(1, 8)),
        max_prefill_tokens=draw(st.sampled_from((1, 500, 8192, 100_000))),
        preempt_shorter_than=draw(st.none() | st.integers(1, 5000)),
        move=draw(st.booleans()),
        join=draw(st.sampled_from(("polled", "gang"))),
        predictor=predictor,
    )


@given(policies(), st.lists(snapshots(), min_size=1, max_size=4))
def test_decisions_are_legal_and_go_on(policy: Policy, moments: list[Snapshot]) -> None:
    for snapshot in moments:
        decision = check(policy.decide(snapshot), snapshot)
        assert goes_on(decision, snapshot)
        assert takes_what_fits(decision, snapshot)


def goes_on(decision: Decision, snapshot: Snapshot) -> bool:
    """Decode is never paused, and what may run on the prefill lane does."""
    if decision.pause_decode:
        return False
    if snapshot.prefill_queued > 1:
        return True
    if snapshot.prefill is not None:
        left = snapshot.num_layers - snapshot.prefill.layers_launched
        return decision.layers > 0 or left == 0
    first = snapshot.waiting[0] if snapshot.waiting else None
    fits = (
        first is not None
        and rows_left(snapshot) > 0
        and first.pages <= snapshot.free_pages - growth_pages(snapshot)
    )
    return bool(decision.prefill) == fits


def takes_what_fits(decision: Decision, snapshot: Snapshot) -> bool:
    """Pages and rows are there; without preemption, the first are taken, in their order."""
    names = [request.id for request in snapshot.waiting]
    pages = {request.id: request.pages for request in snapshot.waiting}
    taken = list(decision.prefill)
    in_order = decision.preempt or taken == names[: len(taken)]
    return in_order and sum(pages[name] for name in taken) <= snapshot.free_pages


@pytest.mark.parametrize("policy", [Chunked(), StaticSplit(16)], ids=lambda p: type(p).__name__)
def test_nothing_to_do(policy: Policy) -> None:
    from tests.policies.snapshots import IDLE

    decision = check(policy.decide(IDLE), IDLE)
    assert not decision.prefill
    assert decision.layers == 0
    assert decision.rung is None
