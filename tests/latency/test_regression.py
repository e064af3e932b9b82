"""The references: contention ignored, and one linear regression."""

from __future__ import annotations

import pytest

from smkern.errors import LatencyError
from smkern.latency import Chunk, Size
from smkern.latency.regression import LEAST_US, ContentionIgnored, LinearRegression
from smkern.latency.sample import Sample
from tests.latency.simple import Linear

LAYERS = 4


def step(batch: int, context: int) -> Size:
    return Size(layers=LAYERS, num_layers=LAYERS, batch=batch, total_kv=batch * context)


def prompt(tokens: int, *, layers: int = LAYERS) -> Size:
    return Size((Chunk(tokens),), layers, LAYERS, True)


def decode_us(batch: int, context: int, sms: int, tokens: int, beside_sms: int) -> float:
    """A line that decode steps follow, beside a prompt."""
    return 5000 + 10 * batch + 0.5 * context - 20 * sms + tokens + 1e-4 * tokens**2 + 2 * beside_sms


STATES = [
    (batch, context, sms, tokens, 100 - sms if tokens else 0)
    for batch in (1, 8, 64)
    for context in (100, 1000)
    for sms in (16, 40, 48)
    for tokens in (0, 512, 2048)
]
SAMPLES = [
    Sample(
        step(batch, context),
        sms,
        decode_us(batch, context, sms, tokens, other),
        prompt(tokens) if tokens else None,
        other,
    )
    for batch, context, sms, tokens, other in STATES
] + [Sample(prompt(tokens), 60, 100.0 + 7 * tokens) for tokens in (10, 50, 90)]
MODEL = LinearRegression(SAMPLES)


def test_a_line_is_found_again() -> None:
    alone = decode_us(20, 500, 30, 0, 0)
    assert MODEL.alone_us(step(20, 500), 30) == pytest.approx(alone)
    beside = decode_us(20, 500, 30, 1000, 70)
    slowdown = MODEL.slowdown(step(20, 500), 30, prompt(1000), 70)
    assert slowdown == pytest.approx(beside / alone)


def test_layers_of_a_prompt_take_their_share() -> None:
    assert MODEL.alone_us(prompt(70), 60) == pytest.approx(590.0)
    assert MODEL.alone_us(prompt(70, layers=1), 60) == pytest.approx(590.0 / 4)


def test_no_prediction_is_below_the_least() -> None:
    # SMs beyond all measured ones, where the line falls below 0
    assert MODEL.alone_us(step(1, 100), 1000) == LEAST_US
    assert MODEL.slowdown(step(1, 100), 48, Size(), 0) == 1.0
    assert MODEL.alone_us(Size(), 48) == 0.0
    assert MODEL.slowdown(Size(), 48, prompt(10), 52) == 1.0


def test_a_neighbour_that_nobody_wrote_down_is_left_out() -> None:
    unknown = Sample(step(1, 100), 16, 1e9, None, 84)
    got = LinearRegression([*SAMPLES, unknown]).alone_us(step(20, 500), 30)
    assert got == pytest.approx(MODEL.alone_us(step(20, 500), 30))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(LatencyError, match="no samples"):
        LinearRegression([])
    with pytest.raises(LatencyError, match="no mixed was measured"):
        MODEL.alone_us(Size((Chunk(8),), 4, 4, True, 2, 20), 60)


def test_contention_can_be_ignored() -> None:
    ignored = ContentionIgnored(Linear())
    assert Linear().slowdown(step(1, 1), 20, prompt(8), 80) == 1.25
    assert ignored.slowdown(step(1, 1), 20, prompt(8), 80) == 1.0
    assert ignored.alone_us(step(1, 1), 20) == Linear().alone_us(step(1, 1), 20)
