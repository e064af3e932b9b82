"""DRIFT: groups, blocks, and whether the running batch has the headroom to give way."""

from __future__ import annotations

import pytest

from smkern.errors import ArgumentError
from smkern.policies import Decision, Drift
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, batch, moment, waiting

RUNNING = (500,) * 10
NOW = moment(waiting=waiting(1000), running_kv=RUNNING)
# The groups of 132 SMs are 29.3 and 44 for decode: the rungs 32 and 48. Steps of ten rows take
# 3,438 us on 32, 2,292 on 48, 833 on all.


def drift(limit_ms: float, **options) -> Drift:
    return Drift(Linear(), tbt_slo_ms=limit_ms, **options)


@pytest.mark.parametrize(("limit_ms", "rung"), [(100.0, 32), (3.5, 32), (3.4, 48), (2.3, 48)])
def test_the_first_group_that_meets_the_limit(limit_ms: float, rung: int) -> None:
    decision = drift(limit_ms).decide(NOW)
    assert (decision.rung, decision.reason, decision.steps) == (rung, f"split {rung}", 1)
    assert decision.join == "gang"


def test_prompts_wait_where_decode_needs_the_device() -> None:
    assert drift(1.0).decide(NOW) == Decision(join="gang", reason="decode alone")


def test_where_nothing_meets_the_limit_prompts_go_on() -> None:
    decision = drift(0.5).decide(NOW)
    assert (decision.rung, decision.prefill) == (48, (0,))
    assert decision.reason == "split 48: nothing meets the limit"


def test_blocks_last_as_long_as_the_step() -> None:
    # 11,000 us on 100 SMs: 306 us a layer, 11.25 in a step of 3,438.
    assert drift(100.0).decide(NOW).layers == 12
    assert drift(3.5).decide(NOW).layers == 11  # twelve take 3,667 us
    begun = moment(prefill=batch(1000, launched=LAYERS - 2), running_kv=RUNNING)
    assert drift(100.0).decide(begun).layers == 2
    long = moment(prefill=batch(40_000), running_kv=RUNNING)
    assert drift(3.5).decide(long).layers == 1


def test_a_round_begins_when_the_last_is_over() -> None:
    for queued in ({"decode_queued": 1}, {"prefill_queued": 1}):
        runs = moment(waiting=waiting(1000), running_kv=RUNNING, **queued)
        decision = drift(100.0).decide(runs)
        assert decision.pause_decode
        assert decision.layers == 0
        assert drift(100.0, join="polled").decide(runs).layers > 0


def test_one_side_alone_has_the_device() -> None:
    assert drift(5.0).decide(moment(waiting=waiting(1000))).rung is None
    assert drift(5.0).decide(moment(running_kv=RUNNING)) == Decision(steps=2)


@pytest.mark.parametrize(("deadline_us", "preempts"), [(76_100.0, True), (75_900.0, False)])
def test_a_batch_gives_way_where_both_fit_its_headroom(deadline_us: float, preempts: bool) -> None:
    # On 100 SMs: 81,000 us in all, 72,000 left, and 4,000 of the new one.
    runs = moment(
        waiting=waiting(300),
        prefill=batch(8000, launched=4, deadline_us=deadline_us),
        running_kv=RUNNING,
    )
    decision = drift(5.0).decide(runs)
    assert decision.preempt is preempts
    assert decision.prefill == ((0,) if preempts else ())


def test_a_longer_batch_may_go_first_too() -> None:
    runs = moment(waiting=waiting(2000), prefill=batch(900, launched=30), running_kv=RUNNING)
    assert drift(5.0).decide(runs).preempt


def test_the_stack_holds_one() -> None:
    deep = moment(
        waiting=waiting(300), prefill=batch(400), preempted=batch(8000, first=200),
        running_kv=RUNNING,
    )  # fmt: skip
    assert not drift(5.0).decide(deep).preempt


def test_without_a_deadline_the_preempted_goes_on_in_between() -> None:
    policy = drift(5.0)
    runs = moment(waiting=waiting(300), prefill=batch(8000, launched=4), running_kv=RUNNING)
    assert policy.decide(runs).preempt
    assert not policy.decide(runs).preempt
    further = moment(waiting=waiting(300), prefill=batch(8000, launched=7), running_kv=RUNNING)
    assert policy.decide(further).preempt


@pytest.mark.parametrize("groups", [(0.5, 0.2), (0.0,), (1.0,), 3, None, ("0.2",)])
def test_groups_that_are_none(groups: object) -> None:
    with pytest.raises(ArgumentError, match=r"groups=.*ascending"):
        drift(5.0, groups=groups)


def test_other_groups() -> None:
    assert drift(100.0, groups=(0.12, 0.2, 0.4)).decide(NOW).rung == 16
    assert drift(5.0, groups=(0.12, 0.2, 0.4)).decide(NOW).rung == 24
