"""Whole prompts first, two streams, layers and steps in turns."""

from __future__ import annotations

from smkern.policies import Decision, PrefillFirst, StaticSplit, Temporal, TwoStreams
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, batch, moment, waiting

RUNNING = (500,) * 10


def test_prompts_first_and_whole() -> None:
    now = moment(waiting=waiting(3000, 4000, 4000), running_kv=RUNNING)
    wanted = Decision(
        prefill=(0, 1), chunk_tokens=8192, layers=LAYERS, pause_decode=True, reason="prompts first"
    )
    assert PrefillFirst().decide(now) == wanted
    assert PrefillFirst(max_prefill_tokens=2000).decide(now).prefill == (0,)
    exactly = moment(waiting=waiting(4192, 4000, 1), running_kv=RUNNING)
    assert PrefillFirst().decide(exactly).prefill == (0, 1)


def test_decode_waits_for_prompts_and_nothing_else() -> None:
    begun = moment(prefill=batch(3000, launched=6), running_kv=RUNNING)
    assert PrefillFirst().decide(begun).layers == LAYERS - 6
    assert PrefillFirst().decide(begun).pause_decode
    for queued in (0, 1):
        ends = moment(
            prefill=batch(3000, launched=LAYERS), running_kv=RUNNING, prefill_queued=queued
        )
        assert PrefillFirst().decide(ends).pause_decode == bool(queued)
    assert PrefillFirst(steps=3).decide(moment(running_kv=RUNNING)) == Decision(steps=3)
    assert PrefillFirst(steps=3).decide(moment(running_kv=RUNNING, joining=1)) == Decision()
    full = moment(waiting=waiting(3000), running_kv=RUNNING, max_running=10)
    assert PrefillFirst().decide(full) == Decision(steps=2)


def test_two_streams_share_the_device() -> None:
    now = moment(waiting=waiting(1000), running_kv=RUNNING)
    decision = TwoStreams().decide(now)
    wanted = Decision(prefill=(0,), chunk_tokens=2048, layers=4, steps=2, shared=True)
    assert decision == wanted
    # A step takes 833 us and a layer 8,333 / 36 = 231, both 1.25 times longer beside each other.
    assert TwoStreams(Linear()).decide(now).layers == 4
    assert TwoStreams(Linear()).decide(moment(prefill=batch(100), running_kv=RUNNING)).layers == 20
    queued = moment(prefill=batch(1000, launched=8), running_kv=RUNNING, prefill_queued=2)
    assert TwoStreams().decide(queued).layers == 0


def test_two_streams_stay_apart_where_one_has_no_work() -> None:
    """Whoever joins or comes finds no work of the other side in front of it."""
    for now in (moment(waiting=waiting(1000)), moment(running_kv=RUNNING)):
        assert TwoStreams().decide(now).shared


def test_layers_between_two_steps_keep_the_limit() -> None:
    now = moment(waiting=waiting(1000), running_kv=RUNNING)
    # (6,000 - 833) / 231 = 22.3.
    assert Temporal(Linear(), tbt_slo_ms=6.0).decide(now).layers == 22
    assert Temporal(Linear(), tbt_slo_ms=0.9).decide(now).layers == 1
    assert Temporal().decide(now).layers == 4
    begun = moment(prefill=batch(1000, launched=LAYERS - 5), running_kv=RUNNING)
    assert Temporal(Linear(), tbt_slo_ms=6.0).decide(begun).layers == 5


def test_it_is_the_steps_turn_while_layers_are_queued() -> None:
    policy = Temporal(Linear(), tbt_slo_ms=6.0)
    for queued in (
        moment(prefill=batch(1000, launched=4), running_kv=RUNNING, prefill_queued=1),
        moment(waiting=waiting(1000), running_kv=RUNNING, prefill_queued=1, joining=1),
        moment(waiting=waiting(1000), prefill_queued=1, joining=1),
    ):
        assert policy.decide(queued) == Decision()
    alone = moment(prefill=batch(1000, launched=4), prefill_queued=1)
    assert policy.decide(alone).layers == 4


def test_decode_around_prompts_that_keep_to_their_side() -> None:
    policy = StaticSplit(32, decode_shares=True)
    decision = policy.decide(moment(waiting=waiting(1000), running_kv=RUNNING))
    assert (decision.rung, decision.prefill_rung, decision.shared) == (None, 32, True)
    alone = policy.decide(moment(waiting=waiting(1000)))
    assert (alone.rung, alone.prefill_rung, alone.shared) == (None, "same", False)


def test_a_static_split_by_default_is_of_about_a_quarter() -> None:
    now = moment(waiting=waiting(1000), running_kv=RUNNING)
    assert StaticSplit().decide(now).rung == 32
