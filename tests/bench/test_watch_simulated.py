"""The served load on a simulated GPU: as the GPU served it, and what a policy makes of it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from smkern.bench.results import COMMITTED, FOLDER, load_results
from smkern.bench.runtime.served_load import SEARCHED, SIZES, WORKLOAD
from smkern.bench.runtime.watch import Watched
from smkern.latency import TablePredictor
from smkern.models import preset
from smkern.policies import Adaptive, Chunked, Policy
from smkern.replay.simulated import DECODE_LAUNCH_US, PREFILL_LAUNCH_US
from smkern.replay.varied import Varied
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from tests.runtime.results import PLAN

pytestmark = pytest.mark.slow

NUM_SMS = 132
OF_ONE_SIZE = 0.018
"""Spread of mixed forwards of one size, as this load has them, on an H200."""
H100 = "h100-80gb-hbm3"


@cache
def table(gpu: str) -> TablePredictor:
    return TablePredictor.load(PLAN.model, gpu)


def served(
    policy: Policy, seconds: float = 3.0, *, gpu: str = COMMITTED, pace: float = 1.0
) -> Watched:
    device = SimDevice(
        NUM_SMS, PLAN.rungs, Varied(table(gpu), OF_ONE_SIZE, pace=pace),
        decode_launch_us=DECODE_LAUNCH_US, prefill_launch_us=PREFILL_LAUNCH_US,
    )  # fmt: skip
    executor = SimExecutor(
        preset(PLAN.model), device, num_pages=SIZES.num_pages, page_size=16,
        max_running=SIZES.max_running, max_prefill=SIZES.max_prefill, max_tokens=SIZES.max_tokens,
        max_context=SIZES.max_context, checks=False,
    )  # fmt: skip
    return WORKLOAD.watch(executor, policy, seconds, preheat_s=1.0)


@pytest.mark.parametrize(
    ("gpu", "name", "limit_ms", "near"),
    [
        # chunks of 448 tokens, which the chip that served computes 8% faster than the table's
        (COMMITTED, "chunked", 15, 0.07), (COMMITTED, "chunked", 20, 0.1),
        (COMMITTED, "chunked", 30, 0.07),
        (COMMITTED, "static_split", 20, 0.07), (COMMITTED, "static_split", 15, 0.07),
        (H100, "chunked", 20, 0.07), (H100, "chunked", 30, 0.07),
    ],
)  # fmt: skip
def test_as_the_gpu_served_it(gpu: str, name: str, limit_ms: int, near: float) -> None:
    """Committed rows of `smkern bench runtime --only served`, which found the settings: the median,
    and the rest at the pace that the chip had by it."""
    case = {"name": "served", "policy": name, "limit": f"{limit_ms}ms", "model": PLAN.model}
    cells = load_results(FOLDER / gpu / "runtime.json").cells
    (real,) = [cell for cell in cells if cell["case"] == case and cell["provider"] == "smkern"]
    found = served(SEARCHED[name](real["setting"]), gpu=gpu).figures()
    pace = real["tbt_p50_ms"] / found["tbt_p50_ms"]
    assert pace == pytest.approx(1.0, rel=near)
    found = served(SEARCHED[name](real["setting"]), gpu=gpu, pace=pace).figures()
    for figure in ("tokens_per_ms", "tbt_p50_ms", "tbt_p99_ms"):
        assert found[figure] == pytest.approx(real[figure], rel=0.07)
    # no host pauses here
    assert found["period_p99_ms"] == pytest.approx(found["tbt_p99_ms"], rel=0.02)


def test_adaptive_stays_with_the_split_that_it_began() -> None:
    """Chunks and splits are close here, and each change would make tokens late."""
    found = served(Adaptive(table(COMMITTED), tbt_slo_ms=20.0), seconds=6.0)
    figures = found.figures()
    assert figures["tokens_per_ms"] > 25.5
    assert figures["tbt_p99_ms"] < 20.0
    are_split = [span.place.num_sms < NUM_SMS for span in found.spans]
    assert sum(one != other for one, other in pairwise(are_split)) < 10
    assert sum(are_split) > 0.9 * len(are_split)


@pytest.mark.parametrize(("pace", "least"), [(0.97, 27.0), (1.06, 24.0)])
def test_adaptive_learns_how_fast_a_chip_is(pace: float, least: float) -> None:
    """Chunks that keep the limit at any of these paces, planned for 0.88 of it, have 20 to 22."""
    figures = served(Adaptive(table(COMMITTED), tbt_slo_ms=20.0), pace=pace).figures()
    assert figures["tokens_per_ms"] > least
    assert figures["tbt_p99_ms"] < 20.0
    planned = Chunked(predictor=table(COMMITTED), tbt_slo_ms=20.0, margin=0.12)
    assert served(planned, pace=pace).figures()["tokens_per_ms"] < 0.85 * least
