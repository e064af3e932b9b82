"""Replays on an executor that runs a model, here a tiny one on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from smkern.bench.replay.cases import FOLDER, Case
from smkern.bench.replay.confirm import (
    at_pace,
    chosen,
    confirm,
    left_of,
    not_simulated,
    noted,
    pace_here,
    paced,
    short,
)
from smkern.bench.replay.gpu import GpuServer, Readings, paces_of
from smkern.bench.replay.measure import BOUND, How, rate_cell
from smkern.bench.replay.rows import pairs
from smkern.bench.results import Results
from smkern.bench.runtime.workload import Sizes, open_executor
from smkern.latency import Chunk, Size, TablePredictor
from smkern.models import Weights
from smkern.policies import Chunked, StaticSplit
from smkern.profile import DEFAULT
from smkern.replay import Arrival, Trace, replay
from smkern.runtime.place import Lane, Place
from smkern.runtime.timeline.trace import Span
from tests.bench.doubles import Meter
from tests.models.generation import tiny

pytestmark = pytest.mark.slow

PROMPTS = Trace(
    "t", tuple(Arrival(0.01 * n, 20 + n, 4, (0, 1) if n % 2 else ()) for n in range(8)), 8
)


@pytest.fixture(scope="module")
def server() -> Iterator[GpuServer]:
    config = tiny(max_position=512)
    sizes = Sizes(
        (32,), max_running=16, max_prefill=4, max_tokens=128, max_context=256, num_pages=200,
        reuse=True,
    )  # fmt: skip
    predictor = TablePredictor.load("qwen3-8b").for_model(config)
    with open_executor(Weights.random(config), sizes) as executor:
        yield GpuServer("tiny", executor, predictor, None)


@pytest.mark.parametrize("policy", [Chunked(32), StaticSplit(32)], ids=["chunked", "split"])
def test_replays_follow_one_another_on_one_executor(server: GpuServer, policy) -> None:
    for _ in range(2):
        served = replay(PROMPTS, server, policy, warm=0.0)
        assert [len(record.token_s) for record in served.records] == [4] * 8
        for record in served.records:
            assert record.ttft_s > 0
            assert list(record.token_s) == sorted(record.token_s)
        assert served.about["errors"] == 0
        assert served.about["sm_mhz"] is None
        assert served.stats.finished == {"length": 8}


def test_what_still_runs_is_cancelled(server: GpuServer) -> None:
    trace = Trace("t", (Arrival(0.0, 9, 200), Arrival(0.05, 9, 1)))
    served = replay(trace, server, Chunked(32), warm=0.0, drain=False)
    assert served.records[1].is_finished
    again = replay(PROMPTS, server, Chunked(32), warm=0.0)
    assert all(record.is_finished for record in again.records)


def test_readings_are_medians() -> None:
    assert Readings(None).stop() == {"sm_mhz": None, "watts": None}
    found = Readings(Meter())
    found._clocks, found._watts = [1400.0, 1500.0, 1600.0], [500.0, 600.0, 650.0]
    assert found.stop() == {"sm_mhz": 1500, "watts": 600}


def goodput(policy: str, rate: float, **case: object) -> dict[str, object]:
    at = {"model": "tiny", "trace": "sharegpt-like", "tbt_slo_ms": 30.0, "order": "fcfs"}
    return {
        "op": "replay", "case": at | case, "provider": policy, "goodput_rps": rate,
        "by_seed": [rate], "seeds": [3], "settings": f"{policy}:64", "arrivals": "poisson",
        "n": 12,
    }  # fmt: skip


def test_goodputs_are_chosen_by_name() -> None:
    cells = [
        goodput("chunked", 5.0), goodput("static_split", 4.0),
        goodput("chunked", 3.0, order="slack"),
        goodput(BOUND, 9.0), goodput("chunked", 0.0), goodput("chunked", 2.0, rate_rps=1.0),
        goodput("chunked", 1.0, model="other"), goodput("chunked", 1.0, pace=1.06),
    ]  # fmt: skip
    everything = {"model": "tiny", "traces": (), "policies": (), "orders": (), "limits_ms": ()}
    assert list(chosen(cells, **everything)) == cells[:3]
    some = everything | {"policies": ("chunked",), "limits_ms": [30.0], "orders": ("fcfs",)}
    assert list(chosen(cells, **some)) == cells[:1]


def test_a_goodput_is_confirmed_with_its_own_requests(server: GpuServer) -> None:
    # sharegpt-like prompts and outputs of up to 256 tokens in all fit
    cell = short(goodput("chunked", 40.0))
    assert cell["case"]["requests"] == 12
    found = confirm(cell, 0.5, server, FOLDER, preheat_s=0.05)
    assert found["n"] == 12
    assert (found["case"]["rate_rps"], found["case"]["seed"]) == (20.0, 3)
    assert (found["provider"], found["of_policy"]) == ("chunked:64", "chunked")
    assert (found["case"]["where"], found["simulated"]) == ("gpu", False)
    assert found["is_expected"] == found["is_met"]
    results = Results()
    assert [x for *_, x in left_of([cell], [0.5, 1.05], results)] == [0.5, 1.05]
    results.add(noted(cell, 0.5, found))
    assert results.cells[0]["confirmed"] == {"0.5": found["is_met"]}
    assert [x for *_, x in left_of([cell], [0.5, 1.05], results)] == [1.05]


def test_what_was_served_is_simulated_with_its_own_requests() -> None:
    case = Case("qwen3-8b", "sharegpt-like", 30.0, "slack", "chunked:512")
    how = How(arrivals="poisson", rungs=(32,), folder=FOLDER)
    made, _ = rate_cell(case, how, 20.0, seed=3, requests=12, drain=False)
    served = made | {"case": made["case"] | {"where": "gpu"}, "simulated": False}
    (found,) = not_simulated([served], (32,), FOLDER, DEFAULT)
    assert found["tbt_ms"] == made["tbt_ms"]
    assert [x for x, _ in pairs([served, found])] == [found]
    assert not list(not_simulated([served, found], (32,), FOLDER, DEFAULT))
    slow = served | {"case": served["case"] | {"pace": 1.1}}
    (found,) = not_simulated([slow], (32,), FOLDER, DEFAULT)
    assert found["tbt_ms"]["p50"] > 1.05 * made["tbt_ms"]["p50"]
    assert [x for x, _ in pairs([slow, found])] == [found]


def test_a_chips_pace_is_that_of_launches_on_all_of_it_and_of_each_kind() -> None:
    predictor, num_layers = TablePredictor.load("qwen3-8b"), 36
    step = Size(num_layers=num_layers, batch=8, total_kv=8000)
    prompts = Size((Chunk(512),), num_layers, num_layers)
    ends: dict[Lane, float] = {"decode": 0.0, "prefill": 0.0}

    def span(pace: float, rung: int | None, size: Size | None, beside: Size | None = None) -> Span:
        """The next of its lane, `pace` times as long as it should be."""
        lane: Lane = "prefill" if size is prompts else "decode"
        place = Place.of(lane, rung, 132)
        us = predictor.alone_us(size, place.num_sms) if size else 7.0
        if size and beside:
            us *= predictor.slowdown(size, place.num_sms, beside, 132 - place.num_sms)
        ends[lane] = (begin := ends[lane]) + pace * us
        return Span(next(numbers), lane, place, "", 0.0, begin, ends[lane], 9e9, size=size)

    numbers = count()
    whole = [span(1.1, None, step), span(1.3, None, step), span(1.0, None, None)]
    ends["prefill"] = ends["decode"]
    split = [span(2.0, 32, prompts, step), span(1.5, 32, step, prompts)]
    assert paces_of([*whole, *split], predictor, 132) == {
        "decode": (2, 1.2), "decode, split": (1, 1.5), "prefill, split": (1, 2.0), "whole": (2, 1.2)
    }  # fmt: skip
    assert paces_of(whole[2:], predictor, 132) == {}


def test_goodputs_are_those_of_the_chip_that_serves(
    server: GpuServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smkern.bench.replay.confirm.PACE_S", 0.5)
    cell = goodput("chunked", 40.0)
    pace = pace_here(cell, server, FOLDER, preheat_s=0.05)
    assert pace > 1.0  # a model on a CPU, by a GPU's table
    cell = goodput("chunked", 1.0, model="qwen3-8b", trace="loogle-like")
    cell |= {"settings": "chunked:512", "n": 40}
    fast, slow = (at_pace(cell, x, (32,), FOLDER, DEFAULT) for x in (1.0, 1.2))
    assert slow["by_seed"][0] < 0.9 * fast["by_seed"][0]
    assert (slow["n"], slow["seeds"], slow["provider"]) == (40, [3], "chunked")
    assert slow["case"] == cell["case"] | {"pace": 1.2, "requests": 40}
    assert fast["case"] == cell["case"] | {"pace": 1.0, "requests": 40}
    # What a file has of this chip is not simulated again, nor its pace measured.
    results = Results()
    results.add(slow)
    assert paced([cell], results, server, (32,), FOLDER, DEFAULT) == [slow]
