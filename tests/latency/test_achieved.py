"""Rates that launches reached, by hand."""

from __future__ import annotations

import pytest

from smkern.errors import LatencyError
from smkern.latency import Chunk, DuetServe, Size
from smkern.latency.achieved import achieved_rates
from smkern.latency.sample import Sample
from tests.latency.small import LAYERS, SIZES
from tests.latency.test_bullet import PROFILE, STEP, STEP_US

PROMPT = Size((Chunk(1000),), 3, LAYERS)
FLOPS = 3 * (2 * 1000 * 1024 * (1536 + 1024 + 8192 + 4096) + 4 * 1024 * 500_500)
"""QKV, O, gate and up, down and 500,500 pairs a layer."""
DECODE = Sample(STEP, 50, 2 * STEP_US)
PREFILL = Sample(PROMPT, 50, FLOPS / 25e6)


def test_the_most_that_launches_alone_reached() -> None:
    slower = [Sample(STEP, 50, 9 * STEP_US), Sample(PROMPT, 50, FLOPS / 10e6)]
    beside = [Sample(STEP, 50, STEP_US, PROMPT, 50), Sample(PROMPT, 50, FLOPS / 50e6, STEP, 50)]
    rates = achieved_rates([DECODE, PREFILL, *slower, *beside], SIZES, PROFILE)
    # at 1 TB/s the step would take STEP_US; 25 x 10^6 FLOPs a us
    assert rates(50) == pytest.approx((0.5, 25.0))
    # the same half of the ceilings elsewhere
    assert rates(10) == pytest.approx((0.2, 5.0))


def test_between_partitions_the_share_of_the_ceiling_is_interpolated() -> None:
    more = Sample(STEP, 100, STEP_US)
    rates = achieved_rates([DECODE, more, PREFILL], SIZES, PROFILE)
    # half an octave from a half to the whole
    assert rates(71)[0] == pytest.approx(0.75, abs=0.005)


def test_a_roofline_under_them() -> None:
    rates = achieved_rates([DECODE, PREFILL], SIZES, PROFILE)
    # half of both rates: twice as long
    slow = DuetServe(SIZES, PROFILE, rates=rates).alone_us(PROMPT, 50)
    assert slow == pytest.approx(2 * DuetServe(SIZES, PROFILE).alone_us(PROMPT, 50))


@pytest.mark.parametrize(("sample", "kind"), [(DECODE, "prefill"), (PREFILL, "decode")])
def test_what_is_missing_is_named(sample: Sample, kind: str) -> None:
    with pytest.raises(LatencyError, match=f"no {kind} was measured alone.*smkern profile"):
        achieved_rates([sample], SIZES, PROFILE)
