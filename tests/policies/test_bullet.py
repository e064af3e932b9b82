"""Bullet: prompts first while output tokens come in time; shortest first; decode pauses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.latency import Size
from smkern.policies import Bullet, Decision, Running, Snapshot, Waiting
from smkern.policies.saturation import Saturation
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, batch, moment, waiting

RUNNING = (500,) * 10
# Steps of ten rows beside prompts take 8,594, 5,729, 4,297, 2,865 us on the four rungs.


def bullet(limit_ms: float = 6.0, **options) -> Bullet:
    return Bullet(Linear(), tbt_slo_ms=limit_ms, **options)


def decoding(*ahead_us: float, limit_us: float = 6000.0, **changes) -> Snapshot:
    """Requests whose next tokens are due so long after now, 1 s."""
    running = [
        Running(number, 0.0, 500, 50, 1e6 + ahead - 50 * limit_us, 0.0)
        for number, ahead in enumerate(ahead_us)
    ]
    kv = (500,) * len(running)
    return moment(now_us=1e6, running_kv=kv, running=tuple(running), **changes)


def test_the_fewest_sms_with_which_the_next_token_is_in_time() -> None:
    assert bullet().decide(moment(waiting=waiting(1000), running_kv=RUNNING)).rung == 24
    for ahead_us, rung in ((9000.0, 24), (5000.0, 32), (4300.0, 32), (4000.0, 48)):
        now = decoding(*[ahead_us] * 10, waiting=waiting(1000))
        assert bullet().decide(now).rung == rung


def test_a_tenth_of_the_requests_may_be_late() -> None:
    now = decoding(3000.0, *[9000.0] * 9, waiting=waiting(1000))
    assert bullet().decide(now).rung == 24
    now = decoding(3000.0, 3000.0, *[9000.0] * 8, waiting=waiting(1000))
    assert bullet().decide(now).rung == 48


def test_behind_its_limit_decode_gets_more_sms_each_time() -> None:
    policy = bullet()
    now = decoding(*[-1000.0] * 10, prefill=batch(1000))
    assert [policy.decide(now).rung for _ in range(4)] == [24, 32, 48, 48]


def test_balanced_where_neither_limit_can_be_met() -> None:
    now = decoding(*[-1000.0] * 10, prefill=batch(1000, deadline_us=1e6))
    decision = bullet().decide(now)
    assert (decision.rung, decision.reason) == (48, "balanced 48")


def test_decode_pauses_while_it_is_ahead_and_prompts_are_late() -> None:
    # 20,000 us ahead, a step of 833 us on all SMs, layers of 8,333 / 36 = 231 us.
    now = decoding(*[20_000.0] * 10, prefill=batch(1000, deadline_us=1e6))
    decision = bullet().decide(now)
    assert decision.pause_decode
    assert (decision.rung, decision.layers) == (None, 4)
    assert decision.ask_again_us == pytest.approx(20_000 - 100_000 * 1.1 / 132)
    assert bullet(layers=36).decide(decoding(*[3000.0] * 10, prefill=now.prefill)).layers == 9
    assert not bullet(pauses=False).decide(now).pause_decode
    in_time = decoding(*[20_000.0] * 10, prefill=batch(1000, deadline_us=2e6))
    assert not bullet().decide(in_time).pause_decode


def test_layers_come_a_fixed_number_at_a_time() -> None:
    for launched, layers in ((0, 4), (LAYERS - 3, 3), (LAYERS, 0)):
        now = moment(prefill=batch(1000, launched=launched), running_kv=RUNNING)
        assert bullet().decide(now).layers == layers
    assert bullet(layers=7).decide(moment(waiting=waiting(1000), running_kv=RUNNING)).layers == 7


def test_decode_spreads_while_the_last_layers_run() -> None:
    last = moment(prefill=batch(1000, launched=LAYERS - 4), running_kv=RUNNING)
    decision = bullet().decide(last)
    assert (decision.rung, decision.prefill_rung, decision.shared) == (32, 24, True)
    before = moment(prefill=batch(1000, launched=LAYERS - 5), running_kv=RUNNING)
    assert bullet().decide(before).prefill_rung == "same"


def test_shortest_first_where_no_deadline_breaks() -> None:
    queue = waiting(900, 300, 500)
    decision = bullet().decide(moment(waiting=queue, running_kv=RUNNING))
    # 1,024 tokens take nearly half of what 2,048 do: a batch holds no more.
    assert (decision.prefill, decision.chunk_tokens) == ((1, 2), 1024)
    assert bullet(reorder=False).decide(moment(waiting=queue, running_kv=RUNNING)).prefill == (0,)
    # A batch of 1,024 takes 11,240 us * 100 / 132, the first 7,483 us of its own.
    for deadline_us, chosen in ((16_100.0, (1, 2)), (15_900.0, (0,))):
        urgent = (Waiting(0, 0.0, 900, deadline_us=deadline_us), *queue[1:])
        assert bullet().decide(moment(waiting=urgent, running_kv=RUNNING)).prefill == chosen


def test_as_they_wait_where_the_first_has_no_pages_and_nothing_runs() -> None:
    """One that was stopped keeps pages: with a more urgent one in front neither would ever run."""
    stopped = Waiting(0, 0.0, 1, pages=0)
    urgent = Waiting(1, 1.0, 900, pages=60, deadline_us=0.0)
    short_of_pages = moment(waiting=(stopped, urgent), free_pages=5)
    assert bullet().decide(short_of_pages).prefill == (0,)
    # While others decode their pages come free, and it waits for them.
    assert not bullet().decide(replace(short_of_pages, running_kv=(500,))).prefill


def test_a_long_prompt_comes_whole_and_alone() -> None:
    decision = bullet().decide(moment(waiting=waiting(5000, 6000), running_kv=RUNNING))
    assert (decision.prefill, decision.chunk_tokens) == ((0,), 5000)


def test_one_side_alone_has_the_device() -> None:
    assert bullet().decide(moment(waiting=waiting(1000))).rung is None
    assert bullet().decide(moment(running_kv=RUNNING)) == Decision(steps=2)


def test_the_percentile_is_looked_at_now_and_then() -> None:
    policy = bullet()
    assert policy.decide(decoding(*[9000.0] * 10, waiting=waiting(1000))).rung == 24
    later = moment(
        now_us=1e6 + 4000.0, waiting=waiting(1000), running_kv=RUNNING, running=_Unread()
    )
    assert policy.decide(later).rung == 32  # 5,000 us are left of 9,000


class _Unread(tuple):  # type: ignore[type-arg]
    def __bool__(self) -> bool:
        return True

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("all requests are looked at again")


def test_saturation_is_where_twice_the_tokens_take_twice_as_long() -> None:
    class Counted(Linear):
        asked = 0

        def alone_us(self, size: Size, num_sms: int) -> float:
            Counted.asked += 1
            return super().alone_us(size, num_sms)

    saturation = Saturation(Counted())
    # 1,000 + 10 n: 512 to 1,024 is 1.84 times, 1,024 to 2,048 1.91 times.
    assert saturation.tokens(36, 100) == 1024
    assert saturation.token_us(36, 100) == pytest.approx(11_240 / 1024)
    asked = Counted.asked
    assert saturation.tokens(36, 100) == 1024
    assert Counted.asked == asked
