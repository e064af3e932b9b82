"""Slowdowns between pairs that were timed."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.latency import Chunk, Size
from smkern.latency.contention import MOST, Pair, Slowdowns

PAIR = Pair(24, 108, 64, 2048, 4096, 0)


def terms(pair: Pair) -> tuple[float, ...]:
    return log2(pair.step_sms), log2(pair.tokens + 1), log2(pair.batch)


def test_a_pair_of_launches() -> None:
    prompts = Size((Chunk(100, 300), Chunk(300)), 2, 2, True)
    got = Pair.of(Size(batch=4, total_kv=800), 24, prompts, 108)
    assert got == Pair(24, 108, 4, 200, 400, 75)


LINE = {
    PAIR._replace(step_sms=n, tokens=t): (n / 8) ** 0.2 * t**0.03
    for n in range(8, 120, 8) for t in (256, 1024, 4096)
}  # fmt: skip


def test_a_line_comes_back() -> None:
    slowdowns = Slowdowns(LINE.items(), terms)
    for pair, ratio in LINE.items():
        # sizes are told apart by half octaves, and coefficients are drawn to 0
        assert slowdowns.at(pair) == pytest.approx(ratio, rel=0.01)


def test_a_slow_pair_is_no_rule() -> None:
    slow = PAIR._replace(step_sms=56, tokens=1024)
    slowdowns = Slowdowns({**LINE, slow: 1.2 * LINE[slow]}.items(), terms)
    assert slowdowns.at(slow) == pytest.approx(LINE[slow], rel=0.03)


def test_one_pair_is_enough() -> None:
    slowdowns = Slowdowns([(PAIR, 1.5)], terms)
    assert slowdowns
    assert slowdowns.at(PAIR) == pytest.approx(1.5)
    assert slowdowns.at(PAIR._replace(step_sms=100)) == pytest.approx(1.5)


def test_none_is_false() -> None:
    assert not Slowdowns([], terms)


def test_between_rungs_it_is_between() -> None:
    slowdowns = Slowdowns(
        [(PAIR._replace(step_sms=n), r) for n, r in ((16, 1.2), (32, 1.5), (64, 1.8))], terms
    )
    assert 1.2 < slowdowns.at(PAIR._replace(step_sms=22)) < 1.5 < slowdowns.at(
        PAIR._replace(step_sms=44)
    ) < 1.8  # fmt: skip


def test_another_models_terms() -> None:
    timed = [(PAIR._replace(step_sms=n), 1 + n / 64) for n in (16, 32, 64)]
    other = Slowdowns(timed, terms).seen_by(lambda pair: terms(pair._replace(step_sms=32)))
    assert other.at(PAIR._replace(step_sms=64)) == pytest.approx(1.5, rel=0.02)


@given(
    st.lists(st.floats(0.5, 20), min_size=1, max_size=9), st.integers(2, 130),
    st.integers(1, 10**6), st.integers(1, 512),
)  # fmt: skip
def test_slowdowns_are_bounded(ratios: list[float], sms: int, tokens: int, batch: int) -> None:
    timed = [(PAIR._replace(step_sms=8 * i + 8), ratio) for i, ratio in enumerate(ratios)]
    slowdowns = Slowdowns(timed, terms)
    assert 1 <= slowdowns.at(Pair(sms, 132 - sms, batch, 100, tokens, 0)) <= MOST
