"""Factors that follow what ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.latency.correction import FADE, HIGH, LOW, Corrected
from smkern.runtime.sim.rates import ConstantRates

STEP = Size(batch=4, total_kv=4096)
PROMPT = Size((Chunk(1000),), 8, 8, True)
RATES = ConstantRates(contention=1.5)


def test_nothing_seen_changes_nothing() -> None:
    corrected = Corrected(RATES)
    assert corrected.alone_us(STEP, 64) == RATES.alone_us(STEP, 64)
    assert corrected.slowdown(STEP, 64, PROMPT, 68) == 1.5
    assert corrected.worst_us(STEP, 64, PROMPT, 68) == 1.5 * RATES.alone_us(STEP, 64)


def test_a_launch_moves_the_factor_of_its_kind_by_hand() -> None:
    corrected = Corrected(RATES, rate=0.5)
    corrected.observe(STEP, 64, 1.21 * RATES.alone_us(STEP, 64))
    assert corrected.factors == {("decode", False): pytest.approx(1.1)}
    assert corrected.alone_us(STEP, 132) == pytest.approx(1.1 * RATES.alone_us(STEP, 132))
    assert corrected.alone_us(PROMPT, 132) == RATES.alone_us(PROMPT, 132)


def test_beside_another_launch_the_time_and_not_the_ratio_is_corrected() -> None:
    corrected = Corrected(RATES, rate=1.0, rate_beside=1.0)
    corrected.observe(STEP, 64, 1.1 * RATES.alone_us(STEP, 64))
    corrected.observe(STEP, 64, 1.2 * 1.5 * RATES.alone_us(STEP, 64), PROMPT, 68)
    together = corrected.alone_us(STEP, 64) * corrected.slowdown(STEP, 64, PROMPT, 68)
    assert together == pytest.approx(1.2 * 1.5 * RATES.alone_us(STEP, 64))


def test_what_was_off_beside_is_forgotten_while_nothing_runs_beside_anything() -> None:
    corrected = Corrected(RATES, rate_beside=1.0)
    for size, num_sms, beside in ((STEP, 64, PROMPT), (PROMPT, 68, STEP)):
        us = 1.5 * RATES.alone_us(size, num_sms)
        corrected.observe(size, num_sms, 1.2 * us, beside, 132 - num_sms)
    assert corrected.factors == {
        ("decode", True): pytest.approx(1.2), ("prefill", True): pytest.approx(1.2)
    }  # fmt: skip
    count = 50
    for _ in range(count):
        corrected.observe(STEP, 132, RATES.alone_us(STEP, 132))
    left = pytest.approx(1.2 ** ((1 - FADE) ** count))
    assert corrected.factors == {
        ("decode", True): left, ("prefill", True): left, ("decode", False): 1.0
    }  # fmt: skip


def test_a_launch_that_waited_does_not_count() -> None:
    corrected = Corrected(RATES, rate=1.0)
    corrected.observe(STEP, 64, 2.5 * RATES.alone_us(STEP, 64))
    corrected.observe(Size(), 64, 10.0)
    assert corrected.factors == {}


@given(st.lists(st.floats(0.1, 10.0), max_size=60))
def test_factors_are_bounded(ratios: list[float]) -> None:
    corrected = Corrected(RATES, rate=0.7)
    for ratio in ratios:
        corrected.observe(PROMPT, 100, ratio * corrected.alone_us(PROMPT, 100))
    assert all(LOW <= factor <= HIGH for factor in corrected.factors.values())
    assert corrected.slowdown(PROMPT, 100, STEP, 32) >= 1


class Guarded(ConstantRates):
    def worst_us(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 7000.0


def test_the_predictors_guard_is_corrected() -> None:
    corrected = Corrected(Guarded(), rate_beside=1.0)
    corrected.observe(STEP, 64, 1.1 * RATES.alone_us(STEP, 64), PROMPT, 68)
    assert corrected.worst_us(STEP, 64, PROMPT, 68) == pytest.approx(7700.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.1, float("nan")])
def test_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(ArgumentError, match="rate="):
        Corrected(RATES, rate=rate)
    with pytest.raises(ArgumentError, match="rate_beside="):
        Corrected(RATES, rate_beside=rate)
