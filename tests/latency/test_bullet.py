"""Bullet's roofline by hand: 1 TB/s from 25 SMs on, 1 TFLOP/s an SM, and its measured factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError, LatencyError, ProfileError
from smkern.latency import Chunk, Size
from smkern.latency.bullet import Bullet
from smkern.latency.sample import Sample
from smkern.latency.scaling import ScalingRates
from tests.latency.small import LAYERS, SIZES
from tests.latency.small import PROFILE as OTHER

PROFILE = replace(
    OTHER,
    curves={
        "bandwidth_tbps_spread_alone": ((25, 1.0), (100, 1.0)),
        "bandwidth_tbps_spread_beside": ((25, 0.25), (100, 1.0)),
        "flops_tflops_spread_alone": ((1, 1.0), (100, 100.0)),
    },
)
SMS = 50


def step(batch: int, keys: int) -> Size:
    return Size(layers=LAYERS, num_layers=LAYERS, batch=batch, total_kv=keys)


def prompt(tokens: int, *, layers: int = LAYERS) -> Size:
    return Size((Chunk(tokens),), layers, LAYERS, layers == LAYERS)


STEP = step(2, 20)
# Elements of a layer: two norms, QKV, two norms of heads, 20 keys and values, O, gate and up, down;
# then the last norm and the head. Memory bounds each.
STEP_US = (
    4 * 2 * (2 * 1024 + 1024 * 1536 + 2 * 128 + 2 * 20 * 256 + 1024 * 1024 + 3 * 1024 * 4096)
    + 2 * (1024 + 1024 * 32_000)
) / 1e6
# FLOPs over 5 x 10^7 a us: QKV, O, gate and up, down, and 500,500 pairs; bytes of norms and head
PROMPT_US = (
    4
    * (
        (2 * 1000 * 1024 * (1536 + 1024 + 8192 + 4096) + 4 * 1024 * 500_500) / 5e7
        + 2 * (2 * 1024 + 2 * 128) / 1e6
    )
    + 2 * (1024 + 1024 * 32_000) / 1e6
)


def model(*samples: Sample) -> Bullet:
    return Bullet(samples, SIZES, PROFILE)


def test_rates_are_two_lines_each() -> None:
    rates = ScalingRates.of(PROFILE)
    assert (rates.tflops, rates.tbps, rates.memory_sms) == (100.0, 1.0, 25)
    assert [rates.memory(sms) for sms in (5, 25, 60)] == pytest.approx([0.2, 1.0, 1.0])
    assert [rates.compute(sms) for sms in (5, 60)] == pytest.approx([5.0, 60.0])


@pytest.mark.parametrize("values", [{"tbps": 0.0}, {"memory_sms": 0}, {"memory_sms": 109}])
def test_impossible_rates_are_refused(values: dict[str, Any]) -> None:
    given = {"num_sms": 108, "tflops": 312.0, "tbps": 2.0, "memory_sms": 30} | values
    with pytest.raises(ArgumentError, match="above 0, and SMs that saturate"):
        ScalingRates(**given)


def test_the_factor_of_a_decode_step() -> None:
    got = model(Sample(STEP, SMS, 3 * STEP_US))
    assert got.alone_us(STEP, SMS) == pytest.approx(3 * STEP_US)
    # the bandwidth of 10 SMs is 0.4, and the only factor holds everywhere
    assert got.alone_us(STEP, 10) == pytest.approx(3 * STEP_US / 0.4)


def test_the_factor_of_a_prompt() -> None:
    got = model(Sample(prompt(1000), SMS, 1.5 * PROMPT_US))
    assert got.alone_us(prompt(1000), SMS) == pytest.approx(1.5 * PROMPT_US)
    head_us = 2 * (1024 + 1024 * 32_000) / 1e6
    one = got.alone_us(prompt(1000, layers=1), SMS)
    assert one == pytest.approx(1.5 * (PROMPT_US - head_us) / 4)


def test_two_samples_calibrate_all_partitions() -> None:
    got = model(Sample(STEP, 10, 2 * STEP_US / 0.4), Sample(STEP, 40, 3 * STEP_US))
    assert got.alone_us(STEP, 10) == pytest.approx(2 * STEP_US / 0.4)
    # an octave from either
    assert got.alone_us(STEP, 20) == pytest.approx(2.5 * STEP_US / 0.8)


def test_a_mixed_forward_has_factors_of_prompts_or_its_own() -> None:
    both = Size((Chunk(1000),), LAYERS, LAYERS, True, 2, 20)
    one, two = Sample(prompt(1000), SMS, PROMPT_US), Sample(prompt(1000), SMS, 2 * PROMPT_US)
    assert model(two).alone_us(both, SMS) == pytest.approx(2 * model(one).alone_us(both, SMS))
    assert model(one, Sample(both, SMS, 777.0)).alone_us(both, SMS) == pytest.approx(777.0)


def beside(size: Size, us: float, neighbour: Size) -> Sample:
    return Sample(size, SMS, us, neighbour, 100 - SMS)


def test_decode_s_bandwidth_under_a_prefill_of_some_length() -> None:
    got = model(
        Sample(STEP, SMS, 2 * STEP_US),
        beside(STEP, 2 * STEP_US / 0.5, prompt(512)),
        beside(STEP, 2 * STEP_US / 0.25, prompt(2048)),
    )
    assert got.slowdown(STEP, SMS, prompt(512), SMS) == pytest.approx(2.0)
    assert got.slowdown(STEP, SMS, prompt(2048), SMS) == pytest.approx(4.0)
    # 1,024 lies between: a share of 0.375
    assert got.slowdown(STEP, SMS, prompt(1024), SMS) == pytest.approx(1 / 0.375)
    assert got.slowdown(step(2, 30), SMS, prompt(512), SMS) == pytest.approx(2.0)


def test_what_the_mean_bandwidth_leaves_is_a_factor() -> None:
    small, large = step(1, 10), step(8, 80)
    alone = [Sample(size, SMS, 1000.0) for size in (small, large)]
    got = model(*alone, beside(small, 1500.0, prompt(512)), beside(large, 1250.0, prompt(512)))
    assert 1000 * got.slowdown(small, SMS, prompt(512), SMS) == pytest.approx(1500.0)
    assert 1000 * got.slowdown(large, SMS, prompt(512), SMS) == pytest.approx(1250.0)


def test_without_pairs_the_profile_s_bandwidth_beside_a_product_counts() -> None:
    got = model(Sample(STEP, SMS, STEP_US))
    # 0.25 + 0.75 x 25 / 75 = 0.5 TB/s on 50 SMs
    assert got.slowdown(STEP, SMS, prompt(512), SMS) == pytest.approx(2.0)


def test_prompts_beside_decode_have_a_factor_of_their_own() -> None:
    alone = Sample(prompt(1000), SMS, PROMPT_US)
    slowed = [beside(prompt(1000), 1.25 * PROMPT_US, step(8, 80))]
    got = model(alone, *slowed)
    assert got.slowdown(prompt(1000), SMS, step(8, 80), SMS) == pytest.approx(1.25)
    assert got.slowdown(prompt(1000, layers=1), SMS, step(8, 80), SMS) > 1.2
    assert model(alone).slowdown(prompt(1000), SMS, step(8, 80), SMS) == 1.0


def test_launches_of_one_phase_do_not_slow_each_other() -> None:
    got = model(Sample(STEP, SMS, STEP_US), beside(STEP, 3 * STEP_US, prompt(512)))
    assert got.slowdown(STEP, SMS, STEP, SMS) == 1.0
    assert got.slowdown(prompt(8), SMS, prompt(8), SMS) == 1.0
    assert got.slowdown(Size(), SMS, prompt(8), SMS) == 1.0


def test_what_is_missing_is_named() -> None:
    with pytest.raises(LatencyError, match=r"no launch was measured alone.*smkern profile"):
        model(beside(STEP, 100.0, prompt(8)))
    with pytest.raises(LatencyError, match="no prefill was measured alone"):
        model(Sample(STEP, SMS, 100.0)).alone_us(prompt(8), SMS)
    with pytest.raises(ProfileError, match="num_sms=101"):
        model(Sample(STEP, SMS, 100.0)).alone_us(STEP, 101)


def test_nothing_takes_no_time() -> None:
    assert model(Sample(STEP, SMS, 100.0)).alone_us(Size(), SMS) == 0.0


@pytest.mark.slow
@given(st.integers(1, 500), st.integers(0, 90), st.integers(1, 99))
def test_with_one_factor_longer_takes_longer_and_more_sms_do_not(batch, more, sms) -> None:
    got = model(Sample(STEP, SMS, STEP_US))
    us = got.alone_us(step(batch, 10 * batch), sms)
    assert got.alone_us(step(batch + 1, 10 * batch + more), sms) >= us
    assert got.alone_us(step(batch, 10 * batch), sms + 1) <= us


def test_samples_of_one_state_count_by_their_mean() -> None:
    got = model(Sample(STEP, SMS, 2 * STEP_US), Sample(STEP, SMS, 3 * STEP_US))
    assert got.alone_us(STEP, SMS) == pytest.approx(2.5 * STEP_US)
