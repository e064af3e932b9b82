"""The search on functions, limits on records made by hand, and one small search simulated."""

from __future__ import annotations

import warnings
from array import array

import pytest

from smkern.errors import ArgumentError, TraceError
from smkern.latency import TablePredictor
from smkern.policies import POLICIES
from smkern.replay import (
    Arrival,
    Record,
    Served,
    SimServer,
    Slo,
    Trace,
    capacity_rps,
    goodput,
    highest,
    load_trace,
    policy_named,
)
from smkern.replay.named import asks_predictor
from tests.policies.snapshots import moment, waiting


@pytest.mark.parametrize("start", [0.02, 1.0, 9.9, 10.0, 10.1, 300.0])
def test_the_search_ends_at_the_edge(start: float) -> None:
    asked: list[float] = []

    def is_kept(rate: float) -> bool:
        asked.append(rate)
        return rate <= 10.0

    kept, failed = highest(is_kept, start)
    assert kept <= 10.0 < failed <= 1.0201 * kept
    assert len(asked) == len(set(asked))
    assert len(asked) <= 19


def test_a_start_near_the_answer_takes_few_rates() -> None:
    asked: list[float] = []
    highest(lambda rate: asked.append(rate) or rate <= 10.0, 9.9, step=1.04)
    assert len(asked) <= 4


def test_what_nothing_keeps_ends_at_the_floor() -> None:
    asked: list[float] = []
    assert highest(lambda rate: bool(asked.append(rate)), 8.0, floor=1.0)[0] == 0.0
    assert min(asked) == 1.0
    with pytest.raises(ArgumentError, match="start=0"):
        highest(lambda rate: True, 0.0)


def served(*times: list[float], limit_s: float = 1.0, warm_s: float = 0.0) -> Served:
    records = [
        Record(float(n), 10, 10, 3, limit_s, array("d", [n + t for t in own]))
        for n, own in enumerate(times)
    ]
    trace = Trace("t", tuple(Arrival(x.at_s, 10, 3) for x in records))
    return Served("p", trace, records, warm_s, 1e9)


def test_limits_by_hand() -> None:
    found = served([0.5, 0.52, 0.55], [1.5, 1.52, 1.53], [])
    tbt, ttft = Slo(25.0).attainment(found)
    assert tbt == pytest.approx(3 / 4)  # of 20, 30, 20 and 10 ms
    assert ttft == pytest.approx(1 / 3)  # 1.5 s is late, and what never came is a miss
    assert not Slo(25.0).is_met(found)
    assert Slo(25.0, tolerated=0.7).is_met(found)
    found.stopped = "late"
    assert not Slo(25.0, tolerated=0.7).is_met(found)


def test_what_was_before_the_warm_up_and_after_the_last_arrival_is_not_counted() -> None:
    found = served([2.0, 2.5, 2.6], [0.5, 0.6, 0.61], warm_s=1.0)
    assert len(found.counted) == 1
    assert found.gaps_s() == pytest.approx([0.5, 0.1, 0.1, 0.01])
    found.end_s = 2.55
    assert found.gaps_s() == pytest.approx([0.5, 0.1, 0.01])


def test_a_watch_is_certain_when_more_are_late_than_may_be() -> None:
    records = [Record(float(n), 10, 10, 3, 1.0) for n in range(200)]
    watch = Slo(25.0).watch(records, 0.0)
    came = {n: n + 0.5 for n in range(200)} | {5: 7.0, 9: 10.5, 11: 13.0}
    late = [watch.verdict(now, lambda n: came[n]) for now in (6.5, 11.5, 50.0)]
    assert late == ["", "", "3 first tokens late at 50.0 s"]
    watch = Slo(25.0).watch(records, 0.0)
    for n in range(3):  # 4 of 400 gaps may be late
        records[n].token_s = array("d", [n + 0.1, n + 0.2, n + 0.3])
        watch.ended(records[n])
    assert watch.verdict(0.0, lambda n: came[n]) == "6 gaps late at 0.0 s"


def test_a_watch_counts_each_request_that_failed_once() -> None:
    records = [Record(float(n), 10, 10, 3, 1.0) for n in range(200)]
    watch = Slo(25.0).watch(records, 1.0)
    for n, first in ((0, [0.1]), (3, [3.1]), (4, [5.5]), (7, [])):
        records[n].token_s, records[n].error = array("d", first), "a launch raised"
        watch.ended(records[n])  # the first in the warm-up, the second with a token in time

    def first_s(n: int) -> float:
        return (*records[n].token_s, n + 0.5 if records[n].error is None else float("inf"))[0]

    assert watch.verdict(20.0, first_s) == "2 first tokens late and 1 requests failed at 20.0 s"


@pytest.mark.parametrize("limit", [0.0, -3.0, float("inf")])
def test_a_limit_that_is_none(limit: float) -> None:
    with pytest.raises(ArgumentError, match="tbt_ms"):
        Slo(limit)


def test_policies_by_name() -> None:
    assert repr(policy_named("static_split:32")).startswith("StaticSplit(32")
    assert "chunk_tokens=256" in repr(policy_named("chunked:256", tbt_slo_ms=10.0))
    assert "max_prefill_tokens=64" in repr(policy_named("static_split:32:max_prefill_tokens=64"))
    for spec, words in (
        ("best", "there is .*chunked"),
        ("chunked:size=3", "has no size; its settings are chunk_tokens, tbt_slo_ms"),
        ("temporal:3", "name what '3' is: temporal:key=3"),
        ("chunked:many", "chunk_tokens='many'"),
        ("chunked:512:256", "gives chunk_tokens twice"),
        ("chunked:512:chunk_tokens=5", "gives chunk_tokens twice"),
        ("chunked:ahead=5", "ahead=5: pass True or False"),
        ("static_split:32:decode_shares=no", "decode_shares='no': pass True or False"),
        ("static_split:32:move=off", "move='off'"),
        ("muxwise:preempt=flase", "preempt='flase'"),
        ("bullet:pauses=off", "pauses='off'"),
        ("bullet:reorder=none", "reorder=None"),
    ):
        with pytest.raises(ArgumentError, match=words):
            policy_named(spec)


def test_what_asks_no_predictor_decides_the_same_without() -> None:
    unasked = [spec for spec in (*POLICIES, "chunked:256", "chunked:64:steps=3")
               if not asks_predictor(spec)]  # fmt: skip
    assert unasked == ["prefill_first", "chunked:256", "chunked:64:steps=3"]
    predictor = TablePredictor.load("qwen3-8b")
    now = moment(waiting=waiting(3000, 400), running_kv=(500,) * 10)
    for spec in unasked:
        one, other = (policy_named(spec, x, tbt_slo_ms=10.0) for x in (predictor, None))
        assert one.decide(now) == other.decide(now)


@pytest.fixture(scope="module")
def server() -> SimServer:
    return SimServer("qwen3-8b")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* requests come within:RuntimeWarning")
def test_a_simulated_search(server: SimServer) -> None:
    trace = load_trace("arxiv-like", requests=30, seed=4)
    slo, predictor = Slo(12.0), server.predictor
    start = capacity_rps(trace, predictor, 132, server.config.num_layers)
    found = goodput(
        lambda: policy_named("chunked", predictor, tbt_slo_ms=12.0), trace, server, slo,
        start_rps=start, precision=0.3,
    )  # fmt: skip
    assert found.by_seed == [found.rate_rps]
    assert found.served[0] is not None
    assert slo.is_met(found.served[0])
    assert found.failed[0] is not None
    assert not slo.is_met(found.failed[0])
    bound = goodput(
        lambda: policy_named("chunked:8192"), trace.without_outputs(), server, slo,
        start_rps=start, precision=0.3,
    )  # fmt: skip
    assert found.rate_rps < bound.rate_rps


@pytest.mark.slow
def test_requests_that_come_within_a_few_limits_are_told_of(server: SimServer) -> None:
    trace = load_trace("sharegpt-like", requests=600)

    def sought(requests: int) -> float:
        return goodput(
            lambda: policy_named("chunked:512"), trace, server, Slo(50.0), start_rps=80.0,
            requests=requests, precision=0.5,
        ).rate_rps  # fmt: skip

    with pytest.warns(RuntimeWarning, match=r"200 requests come within .* replay more requests"):
        short = sought(200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sought(600) < 0.7 * short


def test_no_requests_are_not_all(server: SimServer) -> None:
    trace = load_trace("sharegpt-like", requests=3)
    with pytest.raises(TraceError, match="0 requests are asked for"):
        goodput(lambda: policy_named("chunked"), trace, server, Slo(500.0), requests=0)


def test_too_few_requests_for_any_rate_to_be_too_high(server: SimServer) -> None:
    trace = load_trace("sharegpt-like", requests=3)
    with pytest.raises(TraceError, match="replay more"):
        goodput(lambda: policy_named("chunked"), trace, server, Slo(500.0), start_rps=10.0)
