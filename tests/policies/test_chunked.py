"""Chunked prefill: how large a chunk is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError
from smkern.policies import Chunked, Decision
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, batch, moment, waiting

RUNNING = (500,) * 10


def test_without_a_limit_the_chunk_is_as_said() -> None:
    queue = waiting(300, 300, 300)
    decision = Chunked(512).decide(moment(waiting=queue, running_kv=RUNNING))
    assert decision == Decision(prefill=(0, 1), chunk_tokens=512, steps=2)


def test_with_nothing_to_delay_a_chunk_is_all_that_fits() -> None:
    queue = waiting(5000, 3000, 3000)
    decision = Chunked(512).decide(moment(waiting=queue))
    assert decision == Decision(prefill=(0, 1, 2), chunk_tokens=8192, steps=2)


def test_it_says_what_it_was_made_of() -> None:
    assert repr(Chunked()) == "Chunked(chunk_tokens=512, steps=2, ahead=True)"
    limited = Chunked(tbt_slo_ms=25.0, predictor=Linear())
    assert repr(limited) == "Chunked(tbt_slo_ms=25, steps=2, ahead=True)"


def test_look_ahead() -> None:
    decision = Chunked(ahead=False).decide(moment(waiting=waiting(300), running_kv=RUNNING))
    assert decision == Decision(prefill=(0,), chunk_tokens=512)


def test_where_nobody_waits_several_steps_are_launched() -> None:
    assert Chunked(steps=3).decide(moment(running_kv=RUNNING)) == Decision(steps=3)


@pytest.mark.parametrize(
    ("limit_ms", "tokens", "reason"),
    [
        # No chunk at all holds it: the prompt goes on nevertheless.
        (0.1, 54, "chunk 54: the limit cannot be met beside it"),
        # (6,000 us * 1.32 - 1,000) / 10 = 692 rows; ten tiles of 64, 10 rows of them decode's.
        (6.0, 630, "chunk 630"),
        (1000.0, 2038, "chunk 2038"),  # more than the prompt has: rounded up
    ],
)
def test_the_largest_chunk_under_a_limit(limit_ms: float, tokens: int, reason: str) -> None:
    policy = Chunked(tbt_slo_ms=limit_ms, predictor=Linear())
    decision = policy.decide(moment(waiting=waiting(2000), running_kv=RUNNING))
    assert decision == Decision(prefill=(0,), chunk_tokens=tokens, steps=2, reason=reason)
    assert (tokens + len(RUNNING)) % 64 == 0


def test_a_chunk_is_no_sliver() -> None:
    policy = Chunked(tbt_slo_ms=0.1, predictor=Linear())
    for rows, tokens in ((63, 65), (64, 64), (33, 95), (32, 32)):
        decision = policy.decide(
            moment(waiting=waiting(2000), running_kv=(500,) * rows, max_running=99)
        )
        assert decision.chunk_tokens == tokens


@given(st.integers(1, 90), st.integers(0, 9))
def test_requests_that_join_have_rows_in_the_last_tile(rows: int, joining: int) -> None:
    now = moment(
        waiting=waiting(2000), running_kv=(500,) * rows, joining=joining, max_running=128,
        prefill_queued=min(joining, 1),
    )  # fmt: skip
    decision = Chunked(tbt_slo_ms=3.0, predictor=Linear()).decide(now)
    assert (decision.chunk_tokens + rows + joining) % 64 == 0


def test_a_limit_and_a_count_both_hold() -> None:
    policy = Chunked(100, tbt_slo_ms=1000.0, predictor=Linear())
    decision = policy.decide(moment(waiting=waiting(2000), running_kv=RUNNING))
    assert decision.chunk_tokens == 100


@given(st.lists(st.floats(0.1, 60.0), min_size=2, max_size=2), st.integers(1, 64))
def test_a_wider_limit_takes_no_fewer_tokens(limits: list[float], rows: int) -> None:
    now = moment(waiting=waiting(900, 4000, 4000), running_kv=(500,) * rows, max_running=99)
    tight, wide = (
        Chunked(tbt_slo_ms=limit, predictor=Linear()).decide(now).chunk_tokens
        for limit in sorted(limits)
    )
    assert tight is not None
    assert wide is not None
    assert tight <= wide


def test_who_has_no_share_of_the_chunk_stays() -> None:
    policy = Chunked(tbt_slo_ms=6.0, predictor=Linear())
    for first, chosen in ((629, (0, 1)), (630, (0,))):
        decision = policy.decide(moment(waiting=waiting(first, 640), running_kv=RUNNING))
        assert decision.prefill == chosen


def test_none_is_passed_over_for_want_of_pages() -> None:
    queue = (*waiting(900, pages=57), *waiting(16, first=1, pages=1))
    decision = Chunked().decide(moment(waiting=queue, running_kv=RUNNING, free_pages=60))
    assert decision.prefill == ()
    # Nothing decodes: nobody needs the last pages.
    decision = Chunked().decide(moment(waiting=queue, free_pages=57))
    assert decision.prefill == (0,)


def test_a_batch_of_layers_is_finished_in_turns() -> None:
    runs = moment(waiting=waiting(10), prefill=batch(2000, launched=6), running_kv=RUNNING)
    assert Chunked().decide(runs) == Decision(layers=30)
    # A step takes 833 us, a layer 442 us: (6,000 - 833) / 442 = 11.7.
    limited = Chunked(tbt_slo_ms=6.0, predictor=Linear())
    assert limited.decide(runs) == Decision(layers=11)
    over = moment(prefill=batch(2000, launched=LAYERS), running_kv=RUNNING)
    assert limited.decide(over).layers == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"steps": 0}, "steps=0"),
        ({"chunk_tokens": 512.0}, "chunk_tokens=512.0: give a whole number"),
        ({"steps": True}, "steps=True"),
        ({"tbt_slo_ms": 0.0, "predictor": Linear()}, "tbt_slo_ms=0.0"),
        ({"tbt_slo_ms": float("nan"), "predictor": Linear()}, "tbt_slo_ms=nan"),
        ({"tbt_slo_ms": float("inf"), "predictor": Linear()}, "tbt_slo_ms=inf"),
        ({"tbt_slo_ms": 15.0}, "without a predictor: .*predictor_for"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Chunked(**arguments)  # type: ignore[arg-type]
