"""Windows of whole sessions, rates, overlong requests, limits of first tokens."""

from __future__ import annotations

import numpy as np
import pytest

from smkern.errors import ArgumentError, TraceError
from smkern.replay import Arrival, Trace, load_trace, mixed, new_tokens, sources, ttft_limits_s
from smkern.replay.generate import CONVERSATION_OUTPUT, GENERATORS, LOADS
from smkern.replay.prompts import token_ids

CHAT = Trace(
    "chat",
    tuple(
        Arrival(float(n), 1100, 10, (0, 1 + n % 4, 100 + n)) if n < 8 else Arrival(float(n), 9, 1)
        for n in range(12)
    ),
)
"""Four sessions of two turns that share a system prompt, and four requests by themselves."""


def test_a_session_shares_what_is_not_everybodys() -> None:
    assert CHAT.sessions() == [0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("seed", range(5))
def test_thinning_keeps_sessions_whole_but_the_last(seed: int) -> None:
    thinned = CHAT.thinned(6, seed)
    assert len(thinned) == 6
    assert thinned == CHAT.thinned(6, seed)
    times = [request.at_s for request in thinned.requests]
    assert times == sorted(times)
    assert times[0] == 0.0
    turns = [request.blocks[1] for request in thinned.requests if request.blocks]
    assert sum(turns.count(name) == 1 for name in set(turns)) <= 1


def test_more_than_there_are_come_again_with_blocks_of_their_own() -> None:
    trace = CHAT.thinned(24)
    assert len(trace) == 24
    assert trace.seconds == pytest.approx(2 * CHAT.seconds)
    names = [request.blocks for request in trace.requests if request.blocks]
    assert {blocks[0] for blocks in names} == {0}
    assert len({blocks[1] for blocks in names}) == 8


def test_recorded_arrivals_keep_their_pattern() -> None:
    faster = CHAT.scaled(4.0)
    assert faster.rate_rps == pytest.approx(4.0)
    assert [x.at_s for x in faster.requests] == pytest.approx([n / 4 for n in range(12)])


def test_poisson_arrivals_are_the_same_pattern_at_every_rate() -> None:
    slow, fast = CHAT.at_rate(1.0, seed=3), CHAT.at_rate(2.0, seed=3)
    assert [x.at_s for x in slow.requests] == pytest.approx([2 * x.at_s for x in fast.requests])
    assert [x._replace(at_s=0.0) for x in slow.requests] == [
        x._replace(at_s=0.0) for x in CHAT.requests
    ]
    long = load_trace("sharegpt-like", requests=4000).poisson(5.0)
    assert long.rate_rps == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none(rate: float) -> None:
    for arrivals in ("poisson", "recorded"):
        with pytest.raises(TraceError, match="requests/s"):
            CHAT.at_rate(rate, arrivals)


def test_overlong_requests_are_dropped_or_cut_and_counted() -> None:
    trace = Trace("t", (Arrival(0, 100, 10), Arrival(1, 95, 10), Arrival(2, 50, 200)))
    dropped, cut = trace.fitting(109), trace.fitting(109, "truncate")
    assert (dropped.requests, dropped.overlong) == ((Arrival(1, 95, 10),), 2)
    assert [x[1:3] for x in cut.requests] == [(99, 10), (95, 10), (1, 108)]
    assert cut.overlong == 2
    with pytest.raises(TraceError, match="truncate"):
        trace.fitting(20)
    with pytest.raises(TraceError, match="overlong='cut'"):
        trace.fitting(20, "cut")  # type: ignore[arg-type]


def test_new_tokens_of_a_cache_that_forgets() -> None:
    rows = [(1024, (1, 2)), (1024, (3, 4)), (1500, (1, 2, 5)), (1500, (1, 2, 5)), (1024, (3, 4))]
    trace = Trace("t", tuple(Arrival(float(n), *x[:1], 1, x[1]) for n, x in enumerate(rows)))
    # the third block of 1,500 tokens is not full, so nobody finds it
    assert new_tokens(trace, 4 * 512) == [1024, 1024, 476, 476, 1]
    assert new_tokens(trace, 2 * 512) == [1024, 1024, 1500, 476, 1024]
    assert new_tokens(trace, 0) == [1024, 1024, 1500, 1500, 1024]
    assert ttft_limits_s(trace, 2 * 512) == [1.024, 1.024, 1.5, 1.0, 1.024]
    with pytest.raises(ArgumentError, match="cache_tokens=-1"):
        new_tokens(trace, -1)


def test_prompts_share_what_their_blocks_say() -> None:
    trace = Trace(
        "t", (Arrival(0, 1200, 1, (5, 6)), Arrival(1, 1100, 1, (5, 9)), Arrival(2, 700, 1))
    )
    first, second, third = (token_ids(trace, n, 1000) for n in range(3))
    assert [len(first), len(second), len(third)] == [1200, 1100, 700]
    assert first[:512] == second[:512]
    assert first[512:528] != second[512:528]
    assert third[:16] not in (first[:16], first[512:528])
    assert all(0 <= token < 1000 for token in first + second + third)
    assert first == token_ids(trace, 0, 1000)


@pytest.mark.parametrize("name", sorted(LOADS))
def test_generated_lengths_have_the_tables_means(name: str) -> None:
    trace, load = load_trace(name, requests=4000, seed=1), LOADS[name]
    for found, wanted in (
        ([x.prompt_tokens for x in trace.requests], load.prompt),
        ([x.output_tokens for x in trace.requests], load.output),
    ):
        assert sum(found) / len(found) == pytest.approx(wanted.mean, rel=0.06)
        assert wanted.least <= min(found)
        assert max(found) <= wanted.most
    assert trace == load_trace(name, requests=4000, seed=1)
    assert trace != load_trace(name, requests=4000, seed=2)


def test_openthoughts_shares_its_system_prompt() -> None:
    trace = load_trace("openthoughts-like", requests=20)
    assert trace.block_tokens == 243
    assert {request.blocks for request in trace.requests} == {(0,)}
    assert len(set(trace.sessions())) == 20


def test_conversations_reuse_as_much_as_the_table_says() -> None:
    trace = load_trace("conversation-like", requests=4000)
    prompts = [request.prompt_tokens for request in trace.requests]
    reused = sum(prompts) - sum(new_tokens(trace, 10**9))
    assert sum(prompts) / 4000 == pytest.approx(7538, rel=0.06)
    assert reused / 4000 == pytest.approx(4496, rel=0.12)
    outputs = [request.output_tokens for request in trace.requests]
    assert sum(outputs) / 4000 == pytest.approx(CONVERSATION_OUTPUT.mean, rel=0.06)


def test_a_mixture_has_all_of_each() -> None:
    trace = load_trace("sharegpt-like+loogle-like", requests=200)
    assert sum(request.prompt_tokens >= 3380 for request in trace.requests) == 100
    times = [request.at_s for request in trace.requests]
    assert times == sorted(times)
    parts = [load_trace(name, requests=5) for name in ("openthoughts-like", "conversation-like")]
    with pytest.raises(TraceError, match=r"\[243, 512\]"):
        mixed(parts)


def test_every_generator_says_what_it_is_fitted_to() -> None:
    assert set(sources()) == set(GENERATORS)
    with pytest.raises(TraceError, match="requests=0: give a whole number of at least 1"):
        load_trace("sharegpt-like", requests=0)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "t: no requests"),
        ([(0.0, 9, 0)], "t, request 0: output_tokens=0: give a whole number of at least 1"),
        ([(0.0, 9, 1), (0.5, 0, 1)], "t, request 1: prompt_tokens=0: give a whole number"),
        ([(0.0, 5.5, 1)], "prompt_tokens=5.5: give a whole number of at least 1"),
        ([(0.0, "9", 1)], "prompt_tokens='9': give a whole number of at least 1"),
        ([(float("nan"), 9, 1)], "at_s=nan: give a finite time of at least 0, in seconds$"),
        ([(float("inf"), 9, 1)], "at_s=inf: give a finite time"),
        ([(-1.0, 9, 1)], "at_s=-1.0: give a finite time of at least 0"),
        ([("0", 9, 1)], "at_s='0': give a finite time"),
        ([(2.0, 9, 1), (1.0, 9, 1)], "request 1: at_s=1.0: .* sort by time: 2 is in front of it"),
    ],
)
def test_requests_that_nobody_can_have_sent(requests, words) -> None:
    with pytest.raises(TraceError, match=words):
        Trace("t", tuple(Arrival(*request) for request in requests))


def test_numbers_may_be_numpys() -> None:
    assert len(Trace("t", (Arrival(np.float32(0.5), np.int64(9), np.int32(1)),))) == 1
