"""A fixed split: groups of layers, who goes first, and who takes the whole device."""

from __future__ import annotations

import pytest

from smkern.errors import ArgumentError
from smkern.policies import Decision, StaticSplit
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, batch, moment, waiting

RUNNING = (500,) * 10


def test_a_batch_begins_in_the_queue_order() -> None:
    queue = waiting(3000, 4000, 4000)
    decision = StaticSplit(32).decide(moment(waiting=queue, running_kv=RUNNING))
    assert decision == Decision(rung=32, prefill=(0,), chunk_tokens=2048, layers=4, steps=2)
    decision = StaticSplit(32, max_prefill_tokens=8192).decide(
        moment(waiting=queue, running_kv=RUNNING)
    )
    assert (decision.prefill, decision.chunk_tokens) == ((0, 1, 2), 8192)


def test_a_group_takes_as_long_as_a_step() -> None:
    policy = StaticSplit(50, predictor=Linear())
    # Step: (1,000 + 100) * 2 * 1.25 us; prompt: 11,000 * 100 / 82 * 1.25 us: 36 * 2,200 / 13,415.
    decision = policy.decide(
        moment(waiting=waiting(1000), running_kv=RUNNING, num_sms=132, rungs=(50,))
    )
    assert decision.layers == 6
    runs = moment(prefill=batch(1000, launched=LAYERS - 2), running_kv=RUNNING, rungs=(50,))
    assert policy.decide(runs).layers == 2


def test_it_says_what_it_was_made_of() -> None:
    said = "StaticSplit(32, layers=4, steps=2, max_prefill_tokens=2048, move=True, join='polled')"
    assert repr(StaticSplit(32, layers=4)) == said


def test_groups_are_launched_one_ahead() -> None:
    for queued, layers in ((0, 4), (1, 4), (2, 0)):
        runs = moment(prefill=batch(1000), running_kv=RUNNING, prefill_queued=queued)
        assert StaticSplit(32).decide(runs).layers == layers


@pytest.mark.parametrize("move", [True, False])
def test_a_side_alone_takes_the_whole_device(move: bool) -> None:
    policy = StaticSplit(32, move=move)
    alone = None if move else 32
    assert policy.decide(moment(prefill=batch(1000))).rung == alone
    assert policy.decide(moment(waiting=waiting(1000))).rung == alone
    assert policy.decide(moment(running_kv=RUNNING)).rung == alone
    assert policy.decide(moment(running_kv=RUNNING, prefill=batch(1000))).rung == 32


def test_who_decodes_soon_finds_its_side_free() -> None:
    policy = StaticSplit(32, preempt_shorter_than=500)
    behind = moment(waiting=waiting(1000), prefill_queued=1, joining=1)
    assert policy.decide(behind).rung == 32
    assert policy.decide(moment(waiting=waiting(1000))).rung is None
    begun = moment(prefill=batch(8000, launched=8), prefill_queued=1, joining=1)
    assert policy.decide(begun).rung == 32
    assert policy.decide(moment(prefill=batch(8000, launched=8), prefill_queued=1)).rung is None


def test_no_step_ahead_of_who_joins() -> None:
    policy = StaticSplit(32, steps=4)
    for launched, steps in ((0, 4), (27, 4), (28, 1), (32, 1)):
        runs = moment(prefill=batch(1000, launched=launched), running_kv=RUNNING)
        assert policy.decide(runs).steps == steps
    assert policy.decide(moment(running_kv=RUNNING, joining=1)).steps == 1
    # The next batch has begun while the last layers of the one before it run.
    begun = moment(prefill=batch(1000, launched=4), running_kv=RUNNING, joining=1)
    assert policy.decide(begun).steps == 1
    assert policy.decide(moment(running_kv=RUNNING)).steps == 4


def test_short_prompts_go_before_a_long_one() -> None:
    policy = StaticSplit(32, preempt_shorter_than=500)
    queue = waiting(6000, 200, 500, 100)
    runs = moment(waiting=queue, prefill=batch(8000, launched=4), running_kv=RUNNING)
    decision = policy.decide(runs)
    assert decision.preempt
    assert decision.prefill == (1, 3)


def test_not_before_one_that_is_nearly_over() -> None:
    policy = StaticSplit(32, preempt_shorter_than=500)
    runs = moment(waiting=waiting(300), prefill=batch(3600, launched=33), running_kv=RUNNING)
    assert not policy.decide(runs).preempt


def test_not_two_deep_and_not_twice_at_a_layer() -> None:
    policy = StaticSplit(32, preempt_shorter_than=500)
    runs = moment(waiting=waiting(300), prefill=batch(8000, launched=4), running_kv=RUNNING)
    deep = moment(waiting=waiting(300), prefill=batch(400), preempted=batch(8000, first=200))
    assert not policy.decide(deep).preempt
    assert policy.decide(runs).preempt
    assert policy.decide(runs) == Decision(rung=32, layers=4, steps=2)
    further = moment(waiting=waiting(300), prefill=batch(8000, launched=8), running_kv=RUNNING)
    assert policy.decide(further).preempt


def test_a_gang() -> None:
    assert StaticSplit(32, join="gang").decide(moment(running_kv=RUNNING)).join == "gang"


@pytest.mark.parametrize(
    "name", ["decode_sms", "layers", "steps", "max_prefill_tokens", "preempt_shorter_than"]
)
def test_bad_counts(name: str) -> None:
    arguments = {"decode_sms": 32, name: 0}
    with pytest.raises(ArgumentError, match=f"{name}=0"):
        StaticSplit(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decode_sms": 32.0}, "decode_sms=32.0: give a whole number"),
        ({"decode_sms": 32, "layers": "4"}, "layers='4'"),
        ({"decode_sms": 32, "join": "never"}, "join='never': there is 'polled' and 'gang'"),
    ],
)
def test_what_is_no_setting(arguments: dict[str, object], message: str) -> None:
    """Else every decision would fail, and a plain one be taken for it without a word."""
    with pytest.raises(ArgumentError, match=message):
        StaticSplit(**arguments)  # type: ignore[arg-type]
