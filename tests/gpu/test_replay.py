"""A short replay on a GPU: every request is served in real time, and nothing compiles meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smkern.bench.replay.gpu import GpuServer, open_server
from smkern.policies import Chunked, Policy, StaticSplit
from smkern.replay import Report, Sizes, Slo, load_trace, replay

RUNG = 32
SIZES = Sizes(
    kv_tokens=32_000, rungs=(RUNG,), max_running=16, max_prefill=4, max_tokens=512, max_context=3072
)
SECONDS, RATE = 2.0, 20.0


@pytest.fixture(scope="module")
def server() -> Iterator[GpuServer]:
    with open_server("qwen3-8b", sizes=SIZES, layers=2) as made:
        yield made


@pytest.mark.parametrize("policy", [Chunked(256), StaticSplit(RUNG)], ids=["chunked", "split"])
def test_a_short_replay(server: GpuServer, policy: Policy) -> None:
    trace = load_trace("sharegpt-like", requests=round(SECONDS * RATE)).poisson(RATE)
    for _ in range(2):  # what was missed the first time is captured when it is over
        served = replay(trace, server, policy)
    report = Report.of(served, Slo(50.0))
    assert report.unfinished == 0
    assert report.tbt_ms.p50 > 0
    assert report.rate_rps > 0
    assert served.records[-1].token_s[0] > served.records[-1].at_s > 0.5 * SECONDS
    assert served.about["compiled"] == 0
    assert served.about["errors"] == 0
    assert served.about["sm_mhz"] is None or served.about["sm_mhz"] > 100
