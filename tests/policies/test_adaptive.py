"""Adaptive: which way prompts go, and what makes it change its mind."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.policies import Adaptive, Ended
from smkern.policies.adaptive import MODES
from smkern.policies.way import Mode
from tests.policies.snapshots import LAYERS, RUNGS, batch, moment, waiting

ROWS = (500,) * 10
NOW = moment(waiting=waiting(1000), running_kv=ROWS)


class Shares:
    """A step takes 8 ms on 40 SMs and more, prompts 25 us a token on all; both in one forward take
    the sum. So on 24 SMs a step takes 13.3 ms, and 1,000 tokens beside it 30.6."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        step = 320_000.0 / min(num_sms, 40) if size.batch else 0.0
        return step + 25.0 * size.new_tokens * size.layers / size.num_layers * 132 / num_sms

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 1.0


def adaptive(limit_ms: float = 15.0, **options) -> Adaptive:
    return Adaptive(Shares(), tbt_slo_ms=limit_ms, **options)


def test_the_smallest_split_under_the_limit_where_it_is_fastest() -> None:
    # a chunk of 246 in 14.2 ms would be 17.4 tokens/ms
    decision = adaptive(15.5).decide(NOW)
    assert (decision.rung, decision.prefill, decision.layers) == (24, (0,), 1)
    assert decision.reason.startswith("split: step 13.3 ms, 32.7 tokens/ms")


def test_the_first_and_the_last_group_have_fewer_layers() -> None:
    """What is sent with the first, and the head, take the host as long as layers."""
    policy, launched, groups = adaptive(15.5), 0, []
    now = NOW
    while launched < LAYERS:
        groups.append(policy.decide(now).layers)
        launched += groups[-1]
        now = replace(NOW, waiting=(), rung=24, prefill=batch(1000, launched=launched))
    assert groups == [1, *[3] * ((LAYERS - 3) // 3), *[(LAYERS - 3) % 3] * (LAYERS % 3 > 0), 2]


def test_chunks_where_they_are_asked_for() -> None:
    decision = adaptive(modes=("mixed",)).decide(NOW)
    assert (decision.rung, decision.chunk_tokens, decision.layers) == (None, 246, 0)


@pytest.mark.parametrize(
    ("tokens", "forward_ms", "chunks", "split"), [(500, 20.5, 24.4, 25.0), (1000, 23.8, 26.5, 35.2)]
)
def test_the_present_way_is_left_once_staying_has_cost_a_change(
    tokens: int, forward_ms: float, chunks: float, split: float
) -> None:
    """Else two that are close take turns, and each change costs prompts a pause."""
    now, policy = replace(NOW, waiting=waiting(tokens)), adaptive(25.0)
    # Where no prompt was on its way the choice is free.
    assert policy.decide(now).reason.endswith(f"{split} tokens/ms")
    stays = list(takewhile(lambda x: x.rung is None, (policy.decide(now) for _ in range(200))))
    assert {x.reason for x in stays} == {f"mixed: step {forward_ms} ms, {chunks} tokens/ms"}
    costs_ms = forward_ms * (split / chunks - 1.0)
    assert len(stays) * costs_ms == pytest.approx(40.0, abs=costs_ms + 1.0)
    # The split goes on where it is the faster one, however long.
    assert all(policy.decide(replace(now, rung=16)).rung == 16 for _ in range(200))


def test_a_short_prompt_with_none_behind_it_goes_with_the_step() -> None:
    # On the 108 SMs beside a step on 24 they take 6.1 ms, but the step takes 13.3, longer than one
    # forward of both.
    policy = adaptive(15.5)
    assert policy.decide(replace(NOW, waiting=waiting(200))).reason.startswith("mixed: step 13.0")
    # With more behind it the step may end later.
    many = replace(NOW, waiting=waiting(*[200] * 20))
    assert policy.decide(many).rung == 24


def late(policy: Adaptive, rows: int) -> None:
    """Tell a policy of a step in which all rows were late."""
    size = Size((), LAYERS, LAYERS, False, rows, 500 * rows)
    steps = [
        Ended("decode", 132, size, 0.0, 9e3, 9e3), Ended("decode", 132, size, 9e3, 60e3, 60e3)
    ]  # fmt: skip
    policy.lateness.see(steps, 132)


def test_late_tokens_keep_no_request_from_joining_a_long_step() -> None:
    """Its first token is handed out with the step before that; of a cut prompt nobody joins yet."""
    for tokens in (1000, 3000):
        policy = adaptive()
        late(policy, 100)
        assert policy.decide(replace(NOW, waiting=waiting(tokens))).rung == 32


def test_what_has_gone_by_is_not_spent_again() -> None:
    policy = adaptive(modes=("mixed",))
    waited = moment(waiting=waiting(1000), running_kv=ROWS, token_age_us=3000.0)
    assert policy.decide(waited).chunk_tokens == 118
    # while a step runs its rows have not waited in vain
    runs = moment(waiting=waiting(1000), running_kv=ROWS, token_age_us=3000.0, decode_queued=1)
    assert policy.decide(runs).chunk_tokens == 246


def test_decode_keeps_its_side_while_the_last_layers_run() -> None:
    last = moment(running_kv=ROWS, joining=2, prefill_queued=1, rung=24)
    assert adaptive().decide(last).rung == 24
    assert adaptive().decide(moment(running_kv=ROWS, rung=24)).rung is None


def test_nothing_begins_where_every_way_would_be_late() -> None:
    policy = adaptive(8.3)
    late(policy, 100)
    decision = policy.decide(NOW)
    assert not decision.prefill
    assert decision.reason.startswith("decode alone")


def test_the_least_chunk_may_take_the_whole_limit() -> None:
    # 8 ms of decode and 54 tokens, 9.35 ms in all, are above the aim, 9.02, and within the limit.
    policy = adaptive(9.5, modes=("mixed",))
    decision = policy.decide(NOW)
    assert (decision.prefill, decision.chunk_tokens) == ((0,), 54)
    late(policy, 100)
    assert policy.decide(NOW).prefill == (0,)
    waited = replace(NOW, token_age_us=300.0)
    assert policy.decide(waited).reason == "decode alone: a chunk would be late"


class Tiles(Shares):
    """A chunk beside decode rows takes another tile of every product: 1 ms."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        return super().alone_us(size, num_sms) + 1000.0 * bool(size.batch and size.chunks)


def test_layers_between_steps_where_no_chunk_fits() -> None:
    # The least chunk, of 54 tokens, takes 10.35 ms of 9.5: 5.2 tokens/ms. Two layers and a step
    # take 9.39, and 18 of these the prompt: 5.9.
    policy = Adaptive(Tiles(), tbt_slo_ms=10.0, modes=("mixed", "turns"))
    decision = policy.decide(NOW)
    assert (decision.rung, decision.prefill, decision.layers, decision.steps) == (None, (0,), 2, 1)
    assert decision.reason == "turns: step 9.4 ms, 5.9 tokens/ms"
    runs = replace(NOW, waiting=(), prefill=batch(1000, launched=2))
    assert policy.decide(runs).layers == 2
    assert policy.decide(replace(runs, prefill_queued=1)).layers == 0
    # Nobody's token is late by it; a chunk would be.
    late(policy, 100)
    assert policy.decide(NOW).reason.startswith("turns")
    chunks = Adaptive(Tiles(), tbt_slo_ms=10.0, modes=("mixed",))
    assert chunks.decide(NOW).chunk_tokens == 54


def test_a_chunk_gives_way_to_layers_between_steps_where_it_is_far_slower() -> None:
    def reason(limit_ms: float, *modes: Mode) -> str:
        return Adaptive(Tiles(), tbt_slo_ms=limit_ms, modes=modes).decide(NOW).reason

    assert reason(12.0, "mixed") == "mixed: step 10.3 ms, 5.2 tokens/ms"
    assert reason(12.0, "mixed", "turns") == "turns: step 10.8 ms, 10.3 tokens/ms"
    # 0.72 of what layers would do is near enough.
    assert reason(13.0, "turns") == "turns: step 12.2 ms, 13.7 tokens/ms"
    assert reason(13.0, "mixed", "turns") == "mixed: step 11.9 ms, 9.9 tokens/ms"


def test_chunks_over_their_aim_give_way_once_too_many_tokens_were_late() -> None:
    policy = adaptive(9.5, modes=("mixed", "turns"))
    assert policy.decide(NOW).reason == "mixed: step 9.3 ms, 5.8 tokens/ms"
    late(policy, 30)
    assert policy.decide(NOW).reason.startswith("mixed")
    late(policy, 120)
    assert policy.decide(NOW).reason == "turns: step 8.7 ms, 3.2 tokens/ms"


def test_no_turn_begins_where_it_would_be_late() -> None:
    policy = Adaptive(Tiles(), tbt_slo_ms=10.0, modes=("turns",))
    for moment_ in (replace(NOW, token_age_us=1000.0), replace(NOW, prefill_queued=1)):
        assert policy.decide(moment_).prefill == ()
    assert policy.decide(NOW).prefill == (0,)


def test_a_request_waits_where_its_tokens_could_not_be_drawn_in_time() -> None:
    class Rows(Shares):
        def alone_us(self, size: Size, num_sms: int) -> float:
            return 1000.0 * size.batch + super().alone_us(size, num_sms) / 8

    policy = Adaptive(Rows(), tbt_slo_ms=14.0)
    decision = policy.decide(moment(waiting=waiting(100, 100, 100, 100), running_kv=ROWS))
    assert len(decision.prefill) == 2
    full = moment(waiting=waiting(100), running_kv=(500,) * 13)
    assert policy.decide(full).prefill == ()


def test_a_batch_on_its_way_moves_with_its_rows() -> None:
    policy = adaptive(15.5)
    assert policy.decide(NOW).rung == 24
    going = moment(prefill=batch(1000, launched=16), running_kv=ROWS, prefill_queued=1)
    decision = policy.decide(going)
    assert (decision.rung, decision.layers, decision.steps) == (24, 3, 2)
    slower = Adaptive(Shares(), tbt_slo_ms=12.0)
    assert slower.decide(NOW).rung == 32


def test_prompts_take_all_where_nothing_decodes() -> None:
    decision = adaptive().decide(moment(waiting=waiting(3000)))
    assert (decision.rung, decision.prefill, decision.layers) == (None, (0,), 0)


@pytest.mark.parametrize(
    ("token_us", "tokens"), [(40.0, 2048), (25.0, 2048), (15.6, 4096), (7.8, 8192), (1.0, 8192)]
)
def test_a_batch_has_what_the_device_computes_in_64_ms(token_us: float, tokens: int) -> None:
    class Prompts(Shares):
        def alone_us(self, size: Size, num_sms: int) -> float:
            return super().alone_us(size, num_sms) * token_us / 25.0

    alone = moment(waiting=waiting(20_000))
    assert Adaptive(Prompts(), tbt_slo_ms=15.0).decide(alone).chunk_tokens == tokens
    asked = Adaptive(Prompts(), tbt_slo_ms=15.0, max_prefill_tokens=3000)
    assert asked.decide(alone).chunk_tokens == 3000


def test_it_needs_a_limit_and_a_predictor() -> None:
    with pytest.raises(ArgumentError, match="give both"):
        Adaptive(Shares())
    with pytest.raises(ArgumentError, match="without a predictor"):
        Adaptive(tbt_slo_ms=15.0)
    with pytest.raises(ArgumentError, match=r"modes=\('mix',\): give one or more of"):
        adaptive(modes=("mix",))
    with pytest.raises(ArgumentError, match="modes=3: give one or more of"):
        adaptive(modes=3)


@pytest.mark.parametrize("late", [float("nan"), -0.1, 1.0, 5, "x", None])
def test_a_share_of_late_tokens_that_is_none(late: object) -> None:
    with pytest.raises(ArgumentError, match="late="):
        adaptive(late=late)


def test_it_is_shown_with_what_was_said() -> None:
    assert repr(adaptive(late=0.008, modes=MODES)) == repr(adaptive())
    assert "late=0.1, modes=('split',)" in repr(adaptive(late=0.1, modes=("split",)))


@given(st.floats(9.0, 60.0), st.floats(1.0, 2.0))
def test_a_tighter_limit_never_gives_decode_less(limit_ms: float, factor: float) -> None:
    tight, loose = (
        adaptive(x, modes=("split",)).decide(NOW) for x in (limit_ms, limit_ms * factor)
    )
    if tight.rung is None:
        assert not tight.prefill
    else:
        assert loose.rung is not None
        assert RUNGS.index(loose.rung) <= RUNGS.index(tight.rung)


def test_steps_that_take_less_than_predicted_leave_room_for_longer_chunks() -> None:
    policy = adaptive(modes=("mixed",))
    first = policy.decide(NOW).chunk_tokens
    assert first is not None
    size = Size((Chunk(first),), LAYERS, LAYERS, True, len(ROWS), sum(ROWS))
    us = 0.8 * policy._predictor.alone_us(size, 132)
    ended = [Ended("decode", 132, size, i * us, (i + 1) * us, (i + 1) * us) for i in range(40)]
    later = policy.decide(replace(NOW, ended=tuple(ended))).chunk_tokens
    assert later is not None
    assert later > first


def test_what_ran_beside_is_known_only_while_its_batch_runs() -> None:
    policy = adaptive(15.5, modes=("split",))
    decision = policy.decide(NOW)
    assert decision.rung == 24
    step = Size((), LAYERS, LAYERS, False, len(ROWS), sum(ROWS))
    slow = Ended("decode", 24, step, 1.0, 20e3, 20e3)
    going = moment(prefill=batch(1000, launched=16), running_kv=ROWS, prefill_queued=1)
    policy.decide(replace(going, ended=(slow,)))
    learnt = dict(policy._predictor.factors)
    assert learnt[("decode", True)] > 1
    policy.decide(replace(NOW, ended=(slow._replace(began_us=40e3, ended_us=60e3),)))
    assert policy._predictor.factors == learnt


def test_layers_that_waited_for_the_host_say_nothing_of_the_chip() -> None:
    policy = adaptive(15.5, modes=("split",))
    assert policy.decide(NOW).rung == 24
    layers = Size((Chunk(4),), 3, LAYERS)
    us = 1.5 * policy._predictor.alone_us(layers, 108)
    ended = Ended("prefill", 108, layers, 1.0, 1.0 + us, 1.0 + us, host_us=0.9 * us)
    going = moment(prefill=batch(1000, launched=16), running_kv=ROWS, prefill_queued=1)
    policy.decide(replace(going, ended=(ended,)))
    assert policy._predictor.factors == {}
    policy.decide(replace(going, ended=(ended._replace(host_us=0.5 * us),)))
    assert policy._predictor.factors[("prefill", True)] > 1
