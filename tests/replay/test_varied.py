"""A simulated GPU whose launches take now more, now less than predicted."""

from __future__ import annotations

from math import log
from statistics import correlation, mean, median, stdev

import pytest

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.policies import StaticSplit
from smkern.replay import Arrival, SimServer, Trace, load_trace, replay
from smkern.replay.varied import KEPT, OF_SLOWDOWNS, OF_STEPS, Varied
from smkern.runtime.sim.rates import ConstantRates

STEP = Size(batch=8, total_kv=800)
MIXED = Size((Chunk(100),), 4, 4, True, 8, 800)


def test_times_are_spread_around_the_prediction() -> None:
    for size, spread in ((MIXED, 0.1), (STEP, 0.1 * OF_STEPS)):
        varied, us = Varied(ConstantRates(), 0.1), ConstantRates().alone_us(size, 132)
        ratios = [varied.alone_us(size, 132) / us for _ in range(4000)]
        assert median(ratios) == pytest.approx(1.0, abs=0.01)
        assert stdev(ratios) == pytest.approx(spread, rel=0.1)


def test_slowdowns_of_steps_vary_slowly_and_those_of_prompts_do_not() -> None:
    rates, prompts = ConstantRates(contention=1.5), Size((Chunk(100),), 4, 4)
    varied, slow = Varied(rates, 0.04), rates.slowdown(STEP, 32, prompts, 100)
    ratios = [log(varied.slowdown(STEP, 32, prompts, 100) / slow) for _ in range(8000)]
    assert mean(ratios) == pytest.approx(0.0, abs=0.01)
    assert stdev(ratios) == pytest.approx(0.04 * OF_SLOWDOWNS, rel=0.15)
    assert correlation(ratios[1:], ratios[:-1]) == pytest.approx(KEPT, abs=0.03)
    assert varied.slowdown(prompts, 100, STEP, 32) == rates.slowdown(prompts, 100, STEP, 32)
    assert Varied(ConstantRates(), 0.5).slowdown(STEP, 32, prompts, 100) >= 1.0


def test_a_replay_is_the_same_each_time() -> None:
    trace = load_trace("sharegpt-like", requests=12).at_rate(8.0, "poisson", 0)

    def times(**options: float) -> list[list[float]]:
        server = SimServer("qwen3-8b", **options)
        served = replay(trace, server, StaticSplit(32), warm=0.0)
        return [list(record.token_s) for record in served.records]

    assert times() == times() != times(spread=0)


@pytest.mark.parametrize("spread", [0.0, 0.04])
def test_a_slower_chip_takes_its_pace_times_as_long(spread: float) -> None:
    trace = Trace("t", (Arrival(0.0, 100, 50),))

    def gap_s(pace: float) -> float:
        server = SimServer("qwen3-8b", spread=spread, pace=pace, decode_launch_us=0.0)
        (record,) = replay(trace, server, StaticSplit(32), warm=0.0).records
        return record.token_s[-1] - record.token_s[0]

    assert gap_s(1.1) == pytest.approx(1.1 * gap_s(1.0), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("spread", -0.1), ("spread", 2.0), ("spread", float("nan")), ("spread", "much"),
     ("pace", 0.0), ("pace", -1.0), ("pace", float("inf")), ("pace", float("nan")), ("pace", "")],
)  # fmt: skip
def test_a_spread_or_a_pace_that_is_none(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name}="):
        SimServer("qwen3-8b", **{name: value})  # type: ignore[arg-type]
