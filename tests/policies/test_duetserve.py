"""DuetServe: when it splits, and which split has the most tokens per time."""

from __future__ import annotations

from math import floor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smkern.policies import Decision, DuetServe
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, RUNGS, batch, moment, waiting

RUNNING = (500,) * 10
NOW = moment(waiting=waiting(4000), running_kv=RUNNING)
# Steps of ten rows take 1,100 * 100 us over SMs: 6,875, 4,583, 3,438, 2,292 on the four rungs;
# the prompt 41,000 * 100 us over the others; both in one forward 31,136 us.


def duetserve(limit_ms: float, **options) -> DuetServe:
    return DuetServe(Linear(), tbt_slo_ms=limit_ms, **options)


def test_one_forward_while_it_meets_the_limit() -> None:
    decision = duetserve(31.2).decide(NOW)
    assert decision == Decision(prefill=(0,), chunk_tokens=8182, steps=2)
    assert duetserve(31.1).decide(NOW).rung is not None


def test_the_gang_with_the_most_tokens_per_time() -> None:
    # 24 SMs: 37,963 / 4,583 = 8.3; (8 * 10 + 4,000) / 37,963 beats nine steps and all larger rungs.
    assert duetserve(5.0).decide(NOW) == Decision(
        rung=24,
        prefill=(0,),
        chunk_tokens=8182,
        layers=LAYERS,
        steps=8,
        join="gang",
        reason="split 24, 8 steps",
    )


def test_where_no_split_meets_the_limit_the_largest_is_taken() -> None:
    decision = duetserve(1.0).decide(NOW)
    assert (decision.rung, decision.steps) == (48, 21)
    assert decision.reason == "no split meets the limit: split 48, 21 steps"


def test_without_decode_or_prompts_there_is_nothing_to_split() -> None:
    assert duetserve(5.0).decide(moment(waiting=waiting(4000))).rung is None
    assert duetserve(5.0).decide(moment(running_kv=RUNNING)) == Decision(steps=2)


def test_a_gang_begins_when_nothing_runs() -> None:
    runs = moment(waiting=waiting(4000), running_kv=RUNNING, decode_queued=1)
    decision = duetserve(5.0).decide(runs)
    assert decision.pause_decode
    assert decision.prefill == ()
    # What needs no gang is launched ahead.
    assert duetserve(100.0).decide(runs).prefill == (0,)


def test_what_another_began_is_finished_in_a_gang() -> None:
    begun = moment(prefill=batch(4000, launched=6), running_kv=RUNNING)
    decision = duetserve(5.0).decide(begun)
    assert (decision.rung, decision.layers, decision.join) == (24, LAYERS - 6, "gang")


def test_the_budget_counts_decode_rows() -> None:
    assert duetserve(1e3, token_budget=50).decide(NOW).chunk_tokens == 40
    assert duetserve(1e3, token_budget=5).decide(NOW).chunk_tokens == 1


@pytest.mark.slow
@given(st.integers(1, 64), st.integers(1, 8000), st.floats(0.5, 30.0))
@example(rows=64, tokens=1, limit_ms=1.0)
def test_no_other_split_is_better(rows: int, tokens: int, limit_ms: float) -> None:
    """Algorithm 1, all of its loop."""
    now = moment(waiting=waiting(tokens), running_kv=(500,) * rows, max_running=99)
    decision = duetserve(limit_ms).decide(now)
    if decision.rung is None:
        assert 1000 + 10 * (tokens + rows) <= 1320 * limit_ms
        return

    def rate(rung: int, steps: int) -> float:
        step_us = (1000 + 10 * rows) * 100 / rung
        prompt_us = (1000 + 10 * tokens) * 100 / (132 - rung)
        return (steps * rows + tokens) / max(steps * step_us, prompt_us)

    def best(rung: int) -> float:
        fewer = floor((1000 + 10 * tokens) / (132 - rung) / ((1000 + 10 * rows) / rung))
        return max(rate(rung, min(max(k, 1), 64)) for k in (fewer, fewer + 1))

    allowed = [rung for rung in RUNGS if (1000 + 10 * rows) * 100 / rung <= 1000 * limit_ms]
    assert decision.rung in (allowed or [RUNGS[-1]])
    highest = max(best(rung) for rung in allowed or [RUNGS[-1]])
    assert rate(decision.rung, decision.steps) == pytest.approx(highest)
