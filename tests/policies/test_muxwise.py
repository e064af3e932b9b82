"""MuxWise: the fewest SMs whose worst case meets the limit, and the layers beside a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.latency import Size
from smkern.policies import Decision, MuxWise
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, RUNGS, batch, moment, waiting

RUNNING = (500,) * 10
NOW = moment(waiting=waiting(1000), running_kv=RUNNING)
# Steps of ten rows beside prompts take 8,594, 5,729, 4,297, 2,865 us on the four rungs.


def muxwise(limit_ms: float, **options) -> MuxWise:
    return MuxWise(Linear(), tbt_slo_ms=limit_ms, **options)


class Guarded(Linear):
    """Its worst case is twice what it expects."""

    def worst_us(self, step: Size, num_sms: int, prompts: Size, beside_sms: int) -> float:
        assert prompts.chunks
        assert num_sms + beside_sms == 132
        return 2.5 * self.alone_us(step, num_sms)


@pytest.mark.parametrize(
    ("limit_ms", "rung"), [(100.0, 16), (8.6, 16), (8.5, 24), (4.3, 32), (4.2, 48)]
)
def test_the_fewest_sms_that_meet_the_limit(limit_ms: float, rung: int) -> None:
    decision = muxwise(limit_ms).decide(NOW)
    assert (decision.rung, decision.reason) == (rung, f"split {rung}")


def test_the_guard_counts_where_the_predictor_has_one() -> None:
    assert MuxWise(Guarded(), tbt_slo_ms=8.6).decide(NOW).rung == 32


def test_who_joins_is_a_row_of_the_step() -> None:
    """Ten rows take 5,729 us on 24 SMs; twelve 5,833 of the 5,800 allowed, on 32 4,375."""
    alone = moment(prefill=batch(1000), running_kv=RUNNING)
    assert muxwise(5.8).decide(alone).rung == 24
    joined = moment(prefill=batch(1000), running_kv=RUNNING, joining=2)
    assert muxwise(5.8).decide(joined).rung == 32


def test_where_no_rung_does_the_largest_is_taken() -> None:
    decision = muxwise(2.8).decide(NOW)
    assert (decision.rung, decision.layers) == (48, 8)
    assert decision.reason == "split 48: no rung meets the limit"


def test_layers_last_as_long_as_the_worst_step() -> None:
    # 5,729 us * 36 layers / (11,000 us * 100 / 108 SMs) = 20.25.
    assert muxwise(6.0).decide(NOW).layers == 21
    begun = moment(prefill=batch(1000, launched=LAYERS - 2), running_kv=RUNNING)
    assert muxwise(6.0).decide(begun).layers == 2
    queued = moment(prefill=batch(1000, launched=4), running_kv=RUNNING, prefill_queued=2)
    assert muxwise(6.0).decide(queued).layers == 0


def test_it_joins_when_polled_and_no_step_is_ahead_of_who_joins() -> None:
    assert muxwise(6.0).decide(NOW).join == "polled"
    long = moment(prefill=batch(8000, launched=4), running_kv=RUNNING)
    assert muxwise(6.0).decide(long).steps == 2
    joins = moment(prefill=batch(8000, launched=4), running_kv=RUNNING, joining=1)
    assert muxwise(6.0).decide(joins).steps == 1


def test_one_side_alone_has_the_device() -> None:
    assert muxwise(6.0).decide(moment(waiting=waiting(1000))).rung is None
    assert muxwise(6.0).decide(moment(running_kv=RUNNING)) == Decision(steps=2)
    # But not in front of a request that is about to decode.
    joins = moment(waiting=waiting(1000), joining=1, prefill_queued=1)
    assert muxwise(6.0).decide(joins).rung in RUNGS


@pytest.mark.parametrize(("deadline_us", "preempts"), [(88_100.0, True), (87_900.0, False)])
def test_a_batch_gives_way_where_it_keeps_its_deadline(deadline_us: float, preempts: bool) -> None:
    # On 108 SMs: 93,750 us in all, 83,333 left, and 4,630 of the new one.
    runs = moment(
        waiting=waiting(300),
        prefill=batch(8000, launched=4, deadline_us=deadline_us),
        running_kv=RUNNING,
        rung=24,
    )
    decision = muxwise(6.0).decide(runs)
    assert decision.preempt is preempts
    assert not muxwise(6.0, preempt=False).decide(runs).preempt


def test_deadlines_follow_from_arrivals_where_requests_bring_none() -> None:
    for ttft_ms, preempts in ((80.0, False), (120.0, True)):
        policy = muxwise(6.0, ttft_slo_ms=ttft_ms)
        assert policy.decide(moment(waiting=waiting(8000, first=100), running_kv=RUNNING)).prefill
        runs = moment(
            waiting=waiting(300), prefill=batch(8000, launched=4), running_kv=RUNNING, rung=24
        )
        assert policy.decide(runs).preempt is preempts


def test_only_what_is_over_before_the_running_batch_goes_first() -> None:
    late = moment(
        waiting=waiting(300), prefill=batch(3600, launched=34), running_kv=RUNNING, rung=24
    )
    assert not muxwise(6.0).decide(late).preempt


@given(st.floats(1.0, 50.0), st.floats(1.0, 50.0), st.integers(1, 64), st.integers(1, 8000))
def test_a_wider_limit_never_takes_more_sms(one: float, other: float, rows: int, new: int) -> None:
    now = moment(waiting=waiting(new), running_kv=(500,) * rows, max_running=99)
    tight, wide = (muxwise(limit).decide(now).rung for limit in sorted((one, other)))
    assert tight is not None
    assert wide is not None
    assert tight >= wide
