"""Prices at a moment: each by hand, each asked once."""

from __future__ import annotations

import pytest

from smkern.latency import Size
from smkern.policies.pricing import Prices
from tests.latency.simple import Linear
from tests.policies.snapshots import LAYERS, moment

PROMPT = ((1000, 0),)


class Counted(Linear):
    asked = 0

    def alone_us(self, size: Size, num_sms: int) -> float:
        self.asked += 1
        return super().alone_us(size, num_sms)


def test_times_alone_and_beside_each_other() -> None:
    prices = Prices(Linear(), moment(running_kv=(500,) * 10))
    assert prices.step_us(50) == 2200.0
    assert prices.step_beside_us(50, PROMPT, 82) == 2750.0
    assert prices.worst_step_us(50, PROMPT, 82) == 2750.0
    assert prices.prompts_us(PROMPT, 110) == pytest.approx(10_000.0)
    assert prices.prompts_beside_us(PROMPT, 110, 22) == pytest.approx(12_500.0)
    assert prices.mixed_us(PROMPT) == pytest.approx(11_100 * 100 / 132)
    assert prices.layers_of_a_step(PROMPT, 22, 110) == 18  # 5,000 * 1.25 * 36 / 12,500
    assert prices.layers_within(PROMPT, 6000.0) == 22
    assert prices.layers_within(PROMPT, 1.0) == 1


def test_without_decode_nothing_is_beside() -> None:
    prices = Prices(Linear(), moment())
    assert prices.step_us(50) == prices.step_beside_us(50, PROMPT, 82) == 0.0
    assert prices.prompts_beside_us(PROMPT, 110, 22) == prices.prompts_us(PROMPT, 110)


def test_on_no_sms_nothing_is_beside() -> None:
    """A predictor need not know what stands beside a launch on no SMs."""
    prices = Prices(Linear(), moment(running_kv=(500,) * 10))
    assert prices.prompts_beside_us(PROMPT, 132, 0) == prices.prompts_us(PROMPT, 132)


def test_who_joins_is_a_row_with_the_keys_of_the_others() -> None:
    prices = Prices(Linear(), moment(running_kv=(100, 300), joining=3))
    assert prices.step == Size((), LAYERS, LAYERS, False, 5, 1000)
    assert Prices(Linear(), moment(joining=3)).step.batch == 0


def test_each_is_predicted_once() -> None:
    predictor = Counted()
    prices = Prices(predictor, moment(running_kv=(500,) * 10))
    for _ in range(3):
        prices.step_us(50)
        prices.step_beside_us(50, PROMPT, 82)
        prices.prompts_beside_us(list(PROMPT), 82, 50)
        prices.layers_of_a_step(PROMPT, 50, 82)
    assert predictor.asked == 2
