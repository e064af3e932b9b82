"""Which configurations are measured for power, in which order, and what is made of the figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from smkern.autotune.raw import Measurement
from smkern.bench import prompt_power
from smkern.bench.power import Watts
from smkern.bench.prompt_power import Captured, Item, PowerBench, finalists, items_of
from smkern.bench.prompt_power_rows import Reading, cooler, equally_fast, figures, summarize
from smkern.bench.results import Results
from smkern.bench.tables.power import configurations_table
from smkern.device import Budget
from smkern.measure.partitions import Place
from smkern.measure.sm_clock import NoClock
from smkern.models import preset
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem
from tests.measure.tiny_launches import tiny_launches

PROBLEM = GemmProblem(4096, 6144, 4096)
BUDGET = Budget(100, "mask", True)
WIDE = GemmConfig("ws", 128, 256, 64)
APART = replace(WIDE, overlap=False)
TALL = GemmConfig("ws", 256, 128, 64)
SMALL = GemmConfig("tma", 128, 128, 64, ctas_per_sm=2)
DSL = [GemmConfig("cutlass", 128, n, 64) for n in (160, 200)]


def measured(config: GemmConfig, us: float, error: str | None = None) -> Any:
    return Measurement(PROBLEM, BUDGET, config, us, 0.0, us, error)


def test_the_fastest_of_each_kind_is_measured_at_length_and_what_dispatch_takes():
    found = [
        measured(WIDE, 100.0),
        measured(APART, 101.0),
        measured(DSL[0], 102.0),
        measured(DSL[1], 101.5),
        measured(SMALL, 109.0),
        measured(TALL, 99.0, "wrong result"),
    ]
    assert [x.config for x in finalists(found, WIDE)] == [WIDE, DSL[1]]
    assert [x.config for x in finalists(found, APART)] == [APART, DSL[1]], "one of its kind"
    assert [x.config for x in finalists(found, SMALL)] == [WIDE, DSL[1], SMALL], "however slow"
    assert [x.config for x in finalists(found, SMALL, 2)] == [WIDE, SMALL]


def test_power_is_what_was_drawn_between_two_steps_of_the_counter():
    joules = iter([5.0, 5.0, 12.0, 12.0, 26.0, 33.0])
    times = iter([1.0, 3.0, 4.0])
    watts = Watts(lambda: next(joules), lambda: next(times))
    watts.start()
    for looks in range(6):
        assert watts.watts is None or looks >= 5
        watts.tick()
    assert watts.watts == pytest.approx((33 - 12) / (4 - 1))
    watts.start()
    assert watts.watts is None


def test_without_a_counter_there_is_no_power():
    watts = Watts(None)
    watts.start()
    watts.tick()
    assert watts.watts is None


def test_figures_are_means_and_a_tokens_energy():
    readings = [Reading(100.0, 2000.0, 1400.0, 600.0), Reading(104.0, 2100.0, None, 640.0)]
    assert figures(readings, 4096) == {
        "us": 102.0,
        "us_all": [100.0, 104.0],
        "decode_us": 2050.0,
        "decode_us_all": [2000.0, 2100.0],
        "sm_mhz": 1400.0,
        "watts": 620.0,
        "watts_all": [600.0, 640.0],
        "mj_per_token": round(620 * 102e-6 / 4096 * 1e3, 5),
    }
    assert figures([Reading(None, 2000.0, None, None)])["us"] is None


def cell(config: str, us: float, decode_us: float, mj: float, **more: Any) -> dict[str, Any]:
    case = {"m": 4096, "n": 6144, "k": 4096, "epilogue": "none", "config": config}
    return {
        "op": "gemm",
        "case": case | {"beside": "decode"},
        "num_sms": 100,
        "us": us,
        "decode_us": decode_us,
        "mj_per_token": mj,
        "sm_mhz": 1400.0,
        "tuned_us": us,
        "dispatched": False,
    } | more


def test_of_equally_fast_configurations_the_cooler_one_counts():
    group = [cell("a", 100.0, 2000.0, 0.20), cell("b", 101.9, 1900.0, 0.19)]
    slower = cell("c", 102.1, 1800.0, 0.10, dispatched=True, tuned_us=90.0)
    assert equally_fast([*group, slower]) == group
    assert cooler([*group, slower]) is group[1]
    alone = slower | {"case": slower["case"] | {"beside": None}}
    found = summarize([slower, *reversed(group), alone])
    assert found["equally_fast"]["value"] == 2
    assert found["decode_spread"]["value"] == pytest.approx(2000 / 1900, abs=1e-4)
    assert found["energy_spread"]["value"] == pytest.approx(0.20 / 0.19, abs=1e-4)
    assert found["cooler_over_fastest_decode"]["value"] == pytest.approx(2000 / 1900, abs=1e-4)
    for who in ("tuned", "dispatched"):
        assert found[f"{who}_over_fastest"]["value"] == pytest.approx(1.021, abs=1e-4)
    assert found["noise_of_decode"]["cells"] == 0


def test_the_table_names_a_configuration_once_for_all_that_it_is():
    cells = [
        cell("a", 100.0, 2000.0, 0.20, watts=690.0),
        cell("b", 101.9, 1900.0, 0.19, watts=640.0, dispatched=True),
        cell("c", 101.0, 1800.0, 0.21, watts=700.0),
    ]
    lines = configurations_table(cells).splitlines()
    assert [line.split(" | ")[1:] for line in lines[2:]] == [
        ["fastest: `a`", "100", "0.2000", "690", "1400", "2.000 |"],
        ["coolest, dispatched: `b`", "102", "0.1900", "640", "1400", "1.900 |"],
    ]


def test_nothing_measured_is_no_figure():
    assert all(row["value"] is None for row in summarize([]).values())


def test_products_beside_decode_come_first_and_the_head_has_no_prompts_rows():
    items = items_of(preset("qwen3-8b"), [4096], [100, 84])
    assert [item.decode for item in items] == [True] * 8 + [False] * 8
    assert [item.num_sms for item in items[:8]] == [100] * 4 + [84] * 4
    shapes = {(x.problem.n, x.problem.k, x.problem.epilogue.key) for x in items}
    assert shapes == {
        (6144, 4096, "none"),
        (4096, 4096, "residual"),
        (24576, 4096, "swiglu"),
        (4096, 12288, "residual"),
    }


def place(bench: PowerBench, lane: str, rung: int) -> Any:
    num_sms = rung if lane == "decode" else 132 - rung
    return Place(Budget(num_sms, "mask"), None, "spread")


@dataclass
class FakeGraph:
    name: str
    log: list[str]

    def replay(self) -> None:
        if self.log[-1:] != [self.name]:
            self.log.append(self.name)

    def reset(self) -> None:
        self.log.append(f"{self.name} reset")


@pytest.fixture
def bench(monkeypatch):
    for name in ("SECONDS", "SETTLE_S", "HEAT_S"):
        monkeypatch.setattr(prompt_power, name, 0.0)
    monkeypatch.setattr(prompt_power, "BATCH", 3)
    monkeypatch.setattr(prompt_power, "CONTEXT", 20)
    monkeypatch.setattr(PowerBench, "place", place)
    with tiny_launches(16, max_running=4, max_prefill=2, max_tokens=32) as launches:
        yield PowerBench(launches, Watts(None), clock_on=lambda stream: NoClock())


def test_configurations_are_read_there_and_back_beside_decode_and_once_alone(bench, monkeypatch):
    log: list[str] = []
    tuner = SimpleNamespace(measure=lambda *_: [measured(WIDE, 50.0), measured(TALL, 51.0)])
    dispatcher = SimpleNamespace(select=lambda *_: SimpleNamespace(config=TALL))
    monkeypatch.setattr(prompt_power, "GemmTuner", lambda *_: tuner)
    monkeypatch.setattr(prompt_power, "GemmOperands", lambda *_: None)
    monkeypatch.setattr(prompt_power, "dispatcher_of", lambda: dispatcher)
    monkeypatch.setattr(
        prompt_power,
        "_captured",
        lambda tuner, place, item: Captured(item, FakeGraph(f"ws{item.config.block_m}", log), 10),
    )
    results = Results()
    for decode in (True, False):
        for made in bench.product(Item(PROBLEM, 100, decode), {}):
            results.add(made)
    there = ["ws128", "ws256", "ws128", "ws256"]
    resets = ["ws256 reset", "ws128 reset"]
    assert log == [*there, *resets, "ws128", "ws256", *resets], (
        "each of the ends twice in a row, the first one for heat"
    )
    beside, alone = results.cells[:2], results.cells[2:]
    assert [x["case"]["beside"] for x in results.cells] == ["decode"] * 2 + [None] * 2
    assert all(len(x["us_all"]) == len(x["decode_us_all"]) == 3 for x in beside)
    assert all(x["us"] > 0 and x["decode_us"] is None for x in alone)
    assert [x["dispatched"] for x in beside] == [False, True]
    assert {x["num_sms"] for x in results.cells} == {100}
    again = [Item(PROBLEM, 100, True), Item(PROBLEM, 100, False), Item(PROBLEM, 84, True)]
    again.append(Item(replace(PROBLEM, epilogue=Epilogue(residual=True)), 100, True))
    found = [prompt_power.is_measured(results.cells, item) for item in again]
    assert found == [True, True, False, False]


def test_a_decode_step_alone(bench):
    found = bench.decode_alone(32)
    assert (found["op"], found["num_sms"], found["us"]) == ("decode_step", 32, None)
    assert found["decode_us"] > 0


def test_swiglu_is_named_in_the_case():
    wide = replace(PROBLEM, epilogue=Epilogue(swiglu=True))
    product = Captured(replace(measured(WIDE, 50.0), problem=wide), None, 1)
    readings = [Reading(50.0, None, None, 500.0)]
    found = prompt_power.product_cell(product, Place(BUDGET, None, "spread"), readings, WIDE, False)
    assert found["case"]["epilogue"] == "swiglu"
    assert found["tflops"] == round(2 * 4096 * 6144 * 4096 / 50 / 1e6, 1)
