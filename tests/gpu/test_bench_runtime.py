"""The runtime suite's served load on a GPU: its clock, equal contexts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import smkern
from smkern.bench.runtime.cases import RuntimePlan
from smkern.bench.runtime.served_load import ServedLoad, open_load
from smkern.bench.runtime.watch import Workload
from smkern.bench.runtime.workload import Sizes
from smkern.device import device_info
from smkern.measure.sm_clock import clock_on
from smkern.models import Weights, preset
from smkern.policies import Chunked, Policy, StaticSplit

RUNG = 32
WORKLOAD = Workload(running=4, context=256, prompt=300, reach=32, lead=16)
SIZES = Sizes(
    (), max_running=8, max_prefill=4, max_tokens=512, max_context=768, num_pages=1024, reuse=True
)


@pytest.fixture(scope="module")
def load() -> Iterator[ServedLoad]:
    config = preset("qwen3-8b").replace(
        num_layers=3, hidden_size=1024, intermediate_size=2048, vocab_size=4096, num_q_heads=8,
        num_kv_heads=2,
    )  # fmt: skip
    plan = RuntimePlan(
        "qwen3-8b", (15,), (RUNG,), (64, 128), batch=4, context=256, tokens=300,
        served_pages=SIZES.num_pages,
    )  # fmt: skip
    weights = Weights.random(config, device="cuda")
    with open_load(plan, weights, sizes=SIZES, workload=WORKLOAD, preheat_s=0.0) as made:
        yield made


def test_the_clock_of_a_partition_is_one_that_the_chip_has() -> None:
    with smkern.ladder([RUNG]) as ladder:
        clock = clock_on(torch.device("cuda", 0), ladder.split(decode=RUNG).decode.stream)
        assert clock.mhz() is None
        for _ in range(5):
            clock.read()
        mhz = clock.mhz()
        assert mhz is not None
        assert 100 < mhz < 1.02 * device_info().sm_clock_mhz
        assert clock.mhz() is None, "a reading is told once"


@pytest.mark.parametrize("policy", [Chunked(chunk_tokens=64), StaticSplit(RUNG, layers=1)])
def test_policies_are_watched_over_the_same_contexts(load: ServedLoad, policy: Policy) -> None:
    found = load.watch(policy, 0.3)
    assert found.keys == pytest.approx(WORKLOAD.context, abs=3)
    figures = found.figures()
    assert figures["tokens_per_ms"] > 0
    assert 100 < figures["sm_mhz"] < 1.02 * device_info().sm_clock_mhz
    assert all(span.is_exact for span in found.spans)
