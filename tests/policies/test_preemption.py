"""Who may go before a batch that runs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from smkern.policies import Waiting
from smkern.policies.admission import admitted, whole_prompts
from smkern.policies.preemption import Turns, preempts
from smkern.policies.settings import Limits
from tests.policies.snapshots import batch, moment, waiting


def cost_us(requests: Sequence[Waiting]) -> float:
    return 10.0 * sum(request.tokens for request in requests)


@pytest.mark.parametrize(
    ("left_us", "deadline_us", "chosen"),
    [
        (9000.0, inf, (0, 1)),  # over before it: 3,000 and 5,000 us, the third would make 9,000
        (9000.0, 15_000.0, (0, 1)),
        (9000.0, 13_500.0, (0,)),
        (9000.0, 12_400.0, ()),
        (3000.0, inf, ()),
    ],
)
def test_as_many_as_leave_it_its_deadline(left_us, deadline_us, chosen) -> None:
    now = moment(now_us=500.0, waiting=waiting(300, 200, 400), prefill=batch(900))
    found = preempts(now, left_us=left_us, deadline_us=deadline_us, cost_us=cost_us, tokens=8192)
    assert tuple(request.id for request in found) == chosen


def test_longer_ones_where_they_may() -> None:
    now = moment(waiting=waiting(900), prefill=batch(300))
    for shorter, count in ((True, 0), (False, 1)):
        found = preempts(
            now, left_us=3000.0, deadline_us=13_000.0, cost_us=cost_us, tokens=8192,
            shorter=shorter,
        )  # fmt: skip
        assert len(found) == count


def test_one_level_and_not_twice_at_a_layer() -> None:
    turns = Turns(Limits())
    now = moment(waiting=waiting(300), prefill=batch(900, launched=4))
    assert turns.may_preempt(now)
    turns.begins(now, now.waiting, preempt=True)
    assert not turns.may_preempt(now)
    assert turns.may_preempt(moment(waiting=waiting(300), prefill=batch(900, launched=5)))
    deep = moment(waiting=waiting(300), prefill=batch(900), preempted=batch(80, first=200))
    assert not turns.may_preempt(deep)
    assert not turns.may_preempt(moment(waiting=waiting(300)))
    assert not turns.may_preempt(moment(prefill=batch(900)))


def test_deadlines_of_a_batch_are_its_earliest() -> None:
    turns = Turns(Limits(ttft_us=1000.0))
    mine = (Waiting(100, 50.0, 10), Waiting(101, 40.0, 10), Waiting(102, 0.0, 10, deadline_us=2e3))
    turns.begins(moment(), mine)
    assert turns.deadline_us(batch(10)) == 1040.0
    assert turns.deadline_us(batch(10, deadline_us=900.0)) == 900.0
    assert turns.deadline_us(batch(10, first=7)) == inf


def test_whole_prompts_are_not_cut() -> None:
    now = moment(waiting=waiting(1000, 1000, 1000))
    assert len(admitted(now, 2500)) == 3
    batch_, tokens = whole_prompts(now, 2500)
    assert ([request.id for request in batch_], tokens) == ([0, 1], 2500)
    batch_, tokens = whole_prompts(now, 900)
    assert ([request.id for request in batch_], tokens) == ([0], 1000)
    batch_, tokens = whole_prompts(moment(waiting=waiting(9000)), 2048)
    assert ([request.id for request in batch_], tokens) == ([0], 8192)
    assert whole_prompts(moment(), 2048) == ((), 2048)
