"""Each policy on the simulated device: every request ends, and none is starved by those behind."""

from __future__ import annotations

import warnings

import pytest

from smkern.latency import TablePredictor
from smkern.latency.regression import ContentionIgnored
from smkern.models import SamplingParams, preset
from smkern.policies import ORDERS, POLICIES, Adaptive
from smkern.replay import Report, SimServer, Slo, load_trace, replay
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from smkern.runtime.sim.rates import ConstantRates

pytestmark = pytest.mark.slow

CONFIG = preset("qwen3-8b")
SHORT, LONG, COUNT = 200, 4000, 220
GAP_US = 5_000.0
"""Between two short prompts: less than the device takes for one, and for its tokens."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_long_prompt_is_served_before_short_ones_end(name: str, order: str) -> None:
    rates = ConstantRates(contention=1.2)
    device = SimDevice(132, (16, 32, 48, 64), rates)
    executor = SimExecutor(CONFIG, device, num_pages=4000, max_running=64)
    policy = POLICIES[name](predictor=rates, tbt_slo_ms=40.0, ttft_slo_ms=500.0, order=order)
    mux = Multiplexer(executor, policy=policy)
    wanted = SamplingParams(max_new_tokens=3, ignore_eos=True)
    long = mux.submit([1] * LONG, wanted, arrival_us=GAP_US / 2, deadline_ms=800.0)
    for number in range(COUNT):
        tokens = [2 + number] * SHORT
        mux.submit(tokens, wanted, arrival_us=number * GAP_US, deadline_ms=500.0)
    first_us: dict[int, float] = {}
    ended = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no decision is replaced
        for output in mux.run():
            first_us.setdefault(output.id, device.now_us())
            ended += output.completion is not None
    assert ended == COUNT + 1
    assert not mux.errors
    assert not executor.hazards
    after = sum(us > first_us[long.id] for us in first_us.values())
    assert after > COUNT / 10


@pytest.mark.parametrize("rate_rps", [6.0, 14.0])
def test_a_predictor_that_knows_no_neighbours_keeps_the_limit(rate_rps: float) -> None:
    """What ended beside others corrects it, and is not forgotten before the next split."""
    table = TablePredictor.load("qwen3-8b")
    trace = load_trace("conversation-like", requests=400).at_rate(rate_rps, "poisson", 0)
    knows, knows_not = (
        replay(trace, SimServer("qwen3-8b"), Adaptive(predictor, tbt_slo_ms=15.0))
        for predictor in (table, ContentionIgnored(table))
    )
    kept = Report.of(knows, Slo(15.0)).tbt_kept or 0.0
    assert kept > 0.99
    # twelve draws of 6 to 16 requests/s, by two chips' tables: at most 0.009 fewer
    assert (Report.of(knows_not, Slo(15.0)).tbt_kept or 0.0) > kept - 0.01
