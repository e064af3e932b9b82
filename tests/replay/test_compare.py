"""Policies compared in the simulator: golden figures, names, pictures."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import smkern
from smkern.errors import ArgumentError, ConfigError, TraceError
from smkern.latency import Size
from smkern.models import preset
from smkern.panels import write
from smkern.policies import Decision, Policy, StaticSplit
from smkern.replay import Arrival, Comparison, SimServer, Sizes, Trace, compare, replay, sizes_for
from smkern.replay.plots import draw_splits, limits_picture, rates_picture, strips
from smkern.replay.records import Served
from smkern.replay.simulated import SimSession


class Flat:
    """A prompt's token takes 100 us on the whole device, a decode step 10 ms; no contention."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        share = 132 / num_sms * size.layers / size.num_layers
        return 100.0 * size.new_tokens * share + (10_000.0 if size.batch else 0.0)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 1.0


TRACE = Trace("golden", (Arrival(0.0, 300, 3), Arrival(0.035, 200, 2), Arrival(0.5, 100, 1)))


@pytest.fixture(scope="module")
def server() -> SimServer:
    sizes = Sizes(kv_tokens=64_000, rungs=(66,), max_context=4096)
    return SimServer(
        preset("qwen3-8b"), predictor=Flat(), sizes=sizes, decode_launch_us=0, prefill_launch_us=0,
        spread=0,
    )  # fmt: skip


def times_ms(served) -> list[list[float]]:
    return [[round(1e3 * at_s, 3) for at_s in record.token_s] for record in served.records]


def test_a_golden_replay(server: SimServer) -> None:
    policy = StaticSplit(66, layers=36, steps=1)
    served = replay(TRACE, server, policy, warm=0.0)
    # 300 tokens on all SMs: 30 ms. Two steps of 10 ms follow; the second prompt comes during the
    # first of them, at 35 ms, and begins beside the second, at 40 ms, on 66 of 132 SMs: 200 tokens
    # in 40 ms. The third finds an idle device.
    assert times_ms(served) == [[30.0, 40.0, 50.0], [80.0, 90.0], [510.0]]
    assert [record.limit_s for record in served.records] == [1.0] * 3
    assert served.policy == repr(policy)


def test_a_request_that_is_refused_is_a_miss(server: SimServer) -> None:
    trace = Trace("t", (Arrival(0.0, 5000, 3), Arrival(0.1, 100, 1)))
    served = replay(trace, server, StaticSplit(66), warm=0.0)
    assert "5000" in str(served.records[0].error)
    assert [record.misses for record in served.records] == [True, False]


def test_a_replay_without_drain_ends_with_the_first_tokens(server: SimServer) -> None:
    trace = Trace("t", (Arrival(0.0, 100, 2000), Arrival(0.1, 100, 5), Arrival(0.2, 100, 50)))
    served = replay(trace, server, StaticSplit(66), warm=0.0, drain=False)
    assert served.records[1].ttft_s < 1.0
    assert len(served.records[0].token_s) < 2000


@pytest.fixture(scope="module")
def result() -> Comparison:
    policies = {"mixed": "chunked:256", "split": StaticSplit(32)}
    return smkern.compare(policies, "sharegpt-like", requests=40, rate_rps=20.0, tbt_ms=20.0)


def test_all_serve_the_same_requests(result: Comparison) -> None:
    assert list(result.reports) == ["mixed", "split"]
    one, other = (served.records for served in result.served.values())
    assert [x.at_s for x in one] == [x.at_s for x in other]
    assert all(record.is_finished for record in (*one, *other))
    assert result.reports["mixed"].rate_rps == pytest.approx(20.0, rel=0.5)


def test_a_table_and_a_verdict(result: Comparison) -> None:
    text = str(result)
    assert "sharegpt-like, 40 requests" in text
    assert result.table()[1][0] == "mixed"
    assert "done/s" in result.table()[0]
    assert "requests/s" not in result.table()[0], "that is the rate at which they come"
    assert result.ranking()[0] in result.verdict()
    assert set(result.to_json()) == {"mixed", "split"}
    assert result.reports["split"].runtime["bubbles"] >= 0.0


@pytest.mark.slow
def test_pictures(result: Comparison, tmp_path: Path) -> None:
    points = {"mixed": [(1.0, 0.9), (2.0, 0.5)]}
    found = [
        result.plot(tmp_path / "one.png"),
        write(rates_picture("rates", "title", points, {"TTFT": points}), tmp_path),
        write(limits_picture("limits", "title", {"a trace": points}), tmp_path),
        draw_splits(list(result.served.values()), tmp_path / "splits.png"),
    ]
    assert all(path.read_bytes()[1:4] == b"PNG" for path in found)
    assert [path.name for path in found] == ["one.png", "rates.png", "limits.png", "splits.png"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* requests come within:RuntimeWarning")
def test_goodput_says_who_wins() -> None:
    found = compare(
        ["chunked:256", "chunked:512"], "arxiv-like", requests=20, tbt_ms=30.0, find_goodput=True
    )
    rates = {name: one.rate_rps for name, one in found.goodputs.items()}
    assert found.ranking()[0] == max(rates, key=lambda name: rates[name])
    assert f"{max(rates.values()):.2f} requests/s" in found.verdict()


@pytest.mark.parametrize(
    ("policies", "error", "words"),
    [
        ([], ArgumentError, "no policies"),
        (["best"], ArgumentError, "there is"),
        ([3], ArgumentError, "3 is no policy"),
        (5, ArgumentError, "policies=5: give a list of policies, a mapping with their names, or"),
        (None, ArgumentError, "policies=None: give a list"),
        (["chunked", "chunked"], ArgumentError, "two policies"),
    ],
)
def test_policies_that_are_none(policies, error, words, server: SimServer) -> None:
    with pytest.raises(error, match=words):
        compare(policies, TRACE, server=server)


def test_one_policy_needs_no_list(server: SimServer) -> None:
    policy = StaticSplit(66)
    assert list(compare(policy, TRACE, server=server).reports) == [repr(policy)]
    assert list(compare("chunked:16", TRACE, server=server).reports) == ["chunked:16"]


def test_a_policy_that_fails_is_told(server: SimServer) -> None:
    class Fails:
        def decide(self, snapshot):
            return 1 / 0

    with pytest.warns(RuntimeWarning, match="the policy <.*Fails o.* failed"):
        result = compare([Fails(), "chunked:16"], TRACE, server=server)
    said = str(result).splitlines()[-1]
    assert said.startswith("Fails failed, and plain decisions took its place: ")
    assert "ZeroDivisionError" in said
    assert result.ranking() == ["chunked:16", "Fails"]
    result.served["Fails"].failed_decision = ""
    assert result.ranking() == ["Fails", "chunked:16"], "by its figures alone"


class Crowded:
    """Decides while few wait, and fails when many do."""

    def decide(self, snapshot):
        if len(snapshot.waiting) > 2:
            raise ValueError("a crowd")
        return Decision(prefill=tuple(x.id for x in snapshot.waiting[:1]), chunk_tokens=512)


class OneByOne:
    """Begins a prompt when nothing decodes."""

    def decide(self, snapshot):
        waiting = () if snapshot.batch else snapshot.waiting[:1]
        return Decision(prefill=tuple(x.id for x in waiting), chunk_tokens=512)


@pytest.mark.filterwarnings("ignore:.* requests come within:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:the policy <:RuntimeWarning")
def test_a_policy_that_fails_while_its_goodput_is_sought_comes_last(server: SimServer) -> None:
    trace = Trace("t", tuple(Arrival(float(n), 100, 2) for n in range(300)))
    result = compare(
        [Crowded(), OneByOne()], trace, server=server, rate_rps=0.5, tbt_ms=500.0,
        find_goodput=True,
    )  # fmt: skip
    assert not result.served["Crowded"].failed_decision
    rates = {name: found.rate_rps for name, found in result.goodputs.items()}
    assert rates["Crowded"] > rates["OneByOne"]
    assert result.ranking() == ["OneByOne", "Crowded"]
    assert "Crowded failed, and plain decisions took its place: " in str(result)


class Failing(SimServer):
    """Every tenth launch of decode fails."""

    def open(self, policy: Policy, *, keep: bool = False) -> SimSession:
        session = super().open(policy, keep=keep)
        device, launch, steps = session._device, session._device.launch, count(1)

        def launched(lane, place, work):
            if work.name == "decode" and next(steps) % 10 == 0:
                device.fail_at(device.launches, "raise")
            return launch(lane, place, work)

        device.launch = launched  # type: ignore[method-assign]
        return session


def test_a_longer_context_than_is_replayed_is_asked_for_by_sizes() -> None:
    config = preset("llama-3.1-8b")
    trace = Trace("long", tuple(Arrival(float(n), 50_000, 2) for n in range(2)))
    with pytest.raises(TraceError, match=r"than the 40960 tokens that are .*max_context=\.\.\."):
        compare("chunked:512", trace, server=SimServer(config))
    longer = SimServer(config, sizes=replace(sizes_for(config), max_context=config.max_position))
    result = compare("chunked:512", trace, server=longer)
    assert all(record.is_finished for record in result.served["chunked:512"].records)


def test_requests_that_fail_while_they_decode_are_not_served_in_time(server: SimServer) -> None:
    failing = Failing(server.config, predictor=Flat(), sizes=server.sizes, spread=0)
    trace = Trace("t", tuple(Arrival(0.2 * n, 100, 5) for n in range(30)))
    result = compare([StaticSplit(66, layers=36)], trace, server=failing, rate_rps=5.0)
    (served,), (report,) = result.served.values(), result.reports.values()
    failed = [x.error for x in served.counted if x.error is not None]
    assert 0 < len(failed) == report.unfinished
    assert report.ttft_kept == 1 - len(failed) / report.requests
    assert result.verdict().startswith("None keeps the limits")
    assert f": {len(failed)} requests failed: {failed[0]}" in str(result)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"rate_rps": 0}, TraceError, "a rate of 0 requests/s"),
        ({"rate_rps": "4"}, TraceError, "a rate of '4' requests/s"),
        ({"requests": 0}, TraceError, "0 requests are asked for"),
        ({"requests": "a"}, TraceError, "'a' requests are asked for"),
        ({"tbt_ms": "15"}, ArgumentError, "tbt_ms='15' is no number"),
        ({"tbt_ms": None}, ArgumentError, "tbt_ms=None is no number: pass a float$"),
    ],
)
def test_numbers_that_are_none(given, error, words, server: SimServer) -> None:
    with pytest.raises(error, match=words):
        compare(["chunked"], TRACE, server=server, **given)


def test_a_model_that_is_none() -> None:
    with pytest.raises(ConfigError, match="preset 3: there is"):
        compare(["chunked"], TRACE, model=3)  # type: ignore[arg-type]


def test_what_serves_is_no_name() -> None:
    with pytest.raises(ArgumentError, match="server='gpu': pass what serves"):
        compare(["chunked"], TRACE, server="gpu")  # type: ignore[arg-type]


def test_a_trace_that_is_none(server: SimServer) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        compare(["chunked"], "nowhere.csv", server=server)


def test_a_policys_splits_are_a_row_in_the_colours_of_their_rungs() -> None:
    def replayed(policy: str, split: list[tuple[float, int | None]]) -> Served:
        return Served(policy, TRACE, [], warm_s=0.0, end_s=3.0, split=split)

    served = {
        "split": replayed("split", [(0.0, None), (1.0, 24), (1.5, 40)]),
        "chunked": replayed("chunked", []),
    }
    axes = Figure().add_subplot()
    strips(served)(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["chunked", "split"]
    (mesh,) = (x for x in axes.collections if x.get_array() is not None)
    of_chunks, of_splits = np.asarray(mesh.get_array()).reshape(2, -1)
    assert np.isnan(of_chunks).all()
    third = len(of_splits) // 3
    assert np.isnan(of_splits[:third]).all()
    assert set(of_splits[third + 1 : third * 3 // 2]) == {24}
    assert set(of_splits[third * 3 // 2 + 1 :]) == {40}


def test_a_policy_looks_the_same_in_every_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, set[str]] = {}
    monkeypatch.setattr(
        "smkern.replay.plots.curve",
        lambda points, **style: drawn.setdefault(style["label"], set()).add(style["color"]),
    )
    line = [(1.0, 2.0), (2.0, 3.0)]
    limits_picture("limits", "title", {"one": {"a": line, "b": line}, "two": {"b": line}})
    assert len(drawn["a"]) == len(drawn["b"]) == 1
    assert drawn["a"] != drawn["b"]
