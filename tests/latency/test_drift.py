"""Regressions of either phase by partition."""

from __future__ import annotations

import pytest

from smkern.errors import LatencyError
from smkern.latency import Chunk, Size
from smkern.latency.drift import Drift
from smkern.latency.sample import Sample
from smkern.latency.solo import SoloRun

LAYERS = 4
PREFILL = (0.5, 0.25, 20.0, 300.0)
DECODE = (0.125, 10.0, 100.0)
"""Coefficients on 50 SMs; on 100 SMs all are halved."""


def prompts(*chunks: tuple[int, int], layers: int = LAYERS) -> Size:
    return Size(tuple(Chunk(*chunk) for chunk in chunks), layers, LAYERS, True)


def step(batch: int, keys: int) -> Size:
    return Size(layers=LAYERS, num_layers=LAYERS, batch=batch, total_kv=keys)


PROMPTS = [prompts((8, 0)), prompts((16, 0)), prompts((8, 64), (4, 0)), prompts((32, 16))]
STEPS = [step(1, 100), step(8, 100), step(8, 4000), step(64, 9000)]


def truth(size: Size, num_sms: int) -> float:
    """By hand: sums over prompts and rows times the coefficients."""
    t1, t2, t3, t4 = PREFILL
    if size.chunks:
        us = sum(t1 * n * n + t2 * n * r + t3 * n for n, r in size.chunks) + t4
    else:
        us = DECODE[0] * size.total_kv + DECODE[1] * size.batch + DECODE[2]
    return us * 50 / num_sms


SAMPLES = [Sample(size, sms, truth(size, sms)) for sms in (50, 100) for size in PROMPTS + STEPS]
DRIFT = Drift(SAMPLES)


def test_known_coefficients_price_other_launches() -> None:
    # 0.5 (100 + 36) + 0.25 (10 x 40) + 20 x 16 + 300 = 788
    assert DRIFT.alone_us(prompts((10, 40), (6, 0)), 50) == pytest.approx(788.0)
    # 0.125 x 2000 + 10 x 16 + 100 = 510
    assert DRIFT.alone_us(step(16, 2000), 50) == pytest.approx(510.0)


def test_between_partitions_times_are_linear_in_one_over_sms() -> None:
    # all is inverse to SMs here, so that a line in 1/SMs is exact
    assert DRIFT.alone_us(step(16, 2000), 80) == pytest.approx(510.0 * 50 / 80)
    assert DRIFT.alone_us(prompts((10, 40), (6, 0)), 60) == pytest.approx(788.0 * 50 / 60)


def test_layers_of_a_prompt_take_their_share() -> None:
    assert DRIFT.alone_us(prompts((10, 40), (6, 0), layers=1), 50) == pytest.approx(788.0 / 4)


def test_a_mixed_forward_takes_as_long_as_both_phases() -> None:
    mixed = Size((Chunk(10, 40), Chunk(6)), LAYERS, LAYERS, True, 16, 2000)
    assert DRIFT.alone_us(mixed, 50) == pytest.approx(788.0 + 510.0)


def test_some_layers_can_be_measured() -> None:
    half = [
        Sample(prompts(*s.size.chunks, layers=2), s.num_sms, s.us / 2)
        for s in SAMPLES
        if s.size.chunks
    ]
    solo = SoloRun(half + [sample for sample in SAMPLES if sample.size.batch])
    assert solo.alone_us(prompts((10, 40), (6, 0)), 50) == pytest.approx(788.0)


def test_nothing_takes_no_time() -> None:
    assert DRIFT.alone_us(Size(), 50) == 0.0


def test_contention_is_left_out() -> None:
    beside = [Sample(STEPS[0], 50, 9000.0, PROMPTS[0], 50)]
    got = Drift(SAMPLES + beside)
    assert got.alone_us(STEPS[0], 50) == pytest.approx(truth(STEPS[0], 50))
    assert got.slowdown(STEPS[0], 50, PROMPTS[0], 50) == 1.0


def test_longer_takes_longer() -> None:
    for more in (prompts((11, 40), (6, 0)), prompts((10, 41), (6, 0)), prompts((10, 40), (6, 1))):
        assert DRIFT.alone_us(more, 50) > DRIFT.alone_us(prompts((10, 40), (6, 0)), 50)


@pytest.mark.parametrize("num_sms", [49, 101])
def test_a_partition_outside_the_measured_is_named(num_sms: int) -> None:
    with pytest.raises(LatencyError, match=f"decode on {num_sms} SMs lies outside .*50, 100"):
        DRIFT.alone_us(STEPS[0], num_sms)


def test_a_partition_with_too_few_launches_counts_as_not_measured() -> None:
    few = [Sample(size, 20, 1.0) for size in PROMPTS[:2]]
    solo = SoloRun(SAMPLES + few)
    assert solo.partitions("prefill") == (50, 100)
    with pytest.raises(LatencyError, match="20 SMs: 2 measured for 4 coefficients"):
        solo.alone_us(PROMPTS[0], 20)


def test_where_nothing_cached_was_measured_the_nearest_partition_says_what_it_costs() -> None:
    fresh = [prompts((n, 0)) for n in (8, 16, 32)]
    solo = SoloRun(SAMPLES + [Sample(size, 20, truth(size, 20)) for size in fresh])
    assert solo.partitions("prefill") == (20, 50, 100)
    # all coefficients are inverse to SMs here, and 50 is nearer than 100
    assert solo.alone_us(prompts((10, 40), (6, 0)), 20) == pytest.approx(788.0 * 50 / 20)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (STEPS, "prefill: none was measured; measure prompts"),
        (PROMPTS, "decode: none was measured; measure steps"),
        (PROMPTS[:2] + STEPS, "prefill on 50 SMs: 2 measured for 4 coefficients"),
        ([prompts((n, 0)) for n in (1, 2, 4, 8)] + STEPS, r"sum n\*r is 0 in all 4"),
        (PROMPTS + [step(b, 9 * b) for b in (1, 2, 4)], "batch follows from sum r"),
    ],
    ids=["no prefill", "no decode", "few", "nothing cached", "one length"],
)
def test_what_is_missing_is_named(kept: list[Size], message: str) -> None:
    with pytest.raises(LatencyError, match=message):
        Drift([Sample(size, 50, truth(size, 50)) for size in kept])
