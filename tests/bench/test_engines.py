"""The engines suite: steps read from a log, a budget searched, ratios, on engines that are none."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from smkern.bench.engines import suite
from smkern.bench.engines.cases import (
    ATTENTION,
    FP8,
    FP8_LINEAR,
    LIMITS_MS,
    LINEAR,
    OURS,
    OWN,
    PROVIDERS,
    VLLM,
    EngineLoad,
    vllm_options,
)
from smkern.bench.engines.rows import summarize
from smkern.bench.engines.steps import Step, Steps
from smkern.bench.engines.suite import measure_engine
from smkern.bench.engines.tasks import ROUNDS, TRY_STEPS, VllmTasks
from smkern.bench.results import Results
from smkern.bench.runtime.cases import plans_named
from smkern.bench.runtime.search import last_kept
from smkern.bench.suite import Output, UnknownNameError, known_names
from smkern.bench.tables.engines import alone_table, engines_table

LOAD = EngineLoad(budgets=(112, 128, 144, 160, 176), limits_ms=(15,))


@pytest.mark.parametrize("kept", range(6))
def test_the_last_setting_that_keeps_a_limit_is_found_or_the_first(kept: int) -> None:
    def keeps(setting: int) -> Generator[int, None, bool]:
        yield setting
        return setting <= kept

    def search() -> Generator[int, None, None]:
        found.append((yield from last_kept([1, 2, 3, 4, 5], keeps)))

    found: list[int] = []
    assert len([*search()]) <= 3
    assert found == [max(kept - 1, 0)]


def test_steps_count_where_all_rows_decode_and_prompts_come() -> None:
    log = [
        Step(0.000, 4, 0), Step(0.010, 4, 100), Step(0.025, 4, 60), Step(0.030, 3, 50),
        Step(0.060, 4, 70), Step(0.070, 4, 80), Step(0.075, 4, 0),
    ]  # fmt: skip
    found = Steps.of(log, 4, has_prompt=True)
    assert found.times_ms == pytest.approx([10, 15, 10])
    assert (found.prompt_tokens, found.tokens_per_ms) == (240, pytest.approx(240 / 35))
    assert Steps.of(log, 4, has_prompt=False).times_ms == pytest.approx([5])


@dataclass
class Engine:
    """Steps as long as 5 ms and a tenth of the budget; the longer watch finds 1 ms more."""

    seen: list[tuple[int | None, int]] = field(default_factory=list)
    rounds: int = 0

    def watch(self, budget: int | None, steps: int) -> Steps:
        self.seen.append((budget, steps))
        late = steps > TRY_STEPS
        time_ms = 5 if budget is None else budget / 16 + late
        tokens = 0 if budget is None else steps * (budget - 64)
        return Steps([time_ms] * steps, tokens)

    def prefill_rate(self) -> float:
        self.rounds += 1
        return 30.0 + self.rounds


def tasks(engine: Engine, results: Results, tmp_path: Path) -> list[dict[str, Any]]:
    made = VllmTasks(LOAD, VLLM, lambda: engine, results, steps=200)
    cells = [cell for _, task in made.tasks() for cell in task()]
    for cell in cells:
        results.add(cell)
    return cells


def test_a_budget_is_searched_and_one_that_a_longer_watch_misses_is_left(tmp_path: Path) -> None:
    engine, results = Engine(), Results({})
    cells = tasks(engine, results, tmp_path)
    assert [cell["case"]["name"] for cell in cells] == [
        "decode_alone", *["prefill_alone"] * ROUNDS, *["served_try"] * 3, "served",
    ]  # fmt: skip
    assert [len(cell["rates"]) for cell in cells[1 : 1 + ROUNDS]] == [*range(1, 1 + ROUNDS)]
    assert cells[ROUNDS]["value"] == 30 + (1 + ROUNDS) / 2  # the rounds' median
    # tries of 9, 10 and 11 ms keep 15 ms, and so do the 12 ms of 200 steps
    assert cells[-1]["budget"] == 176
    assert cells[-1]["value"] == pytest.approx((176 - 64) / 12, abs=1e-3)
    before = len(engine.seen)
    tasks(engine, results, tmp_path)  # tries are remembered
    assert [seen for seen in engine.seen[before:] if seen[1] == TRY_STEPS] == []


def test_each_model_has_a_plan_for_smkerns_own_engines() -> None:
    names = [model + ending for model in LIMITS_MS for ending in OWN.values()]
    assert {plan.model for plan in plans_named(names)} == {*names}


def test_a_missed_limit_steps_back() -> None:
    load = EngineLoad(budgets=(112, 128, 144, 160, 176), limits_ms=(10,))
    engine = Engine()
    made = VllmTasks(load, VLLM, lambda: engine, Results({}), steps=200)
    *_, cell = [cell for _, task in made.tasks() for cell in task()]
    assert cell["budget"] == 144
    assert cell["tbt_p99_ms"] == 10


class Pausing(Engine):
    """The host pauses in every other watch: two of its steps last 20 ms longer."""

    def watch(self, budget: int | None, steps: int) -> Steps:
        found = super().watch(budget, steps)
        if len(self.seen) % 2:
            found.times_ms[:2] = [t + 20 for t in found.times_ms[:2]]
        return found


def test_a_try_that_a_pause_spoils_is_watched_again() -> None:
    load = EngineLoad(budgets=(112, 128, 144, 160, 176), limits_ms=(10,))
    engine = Pausing()
    tried = [
        cell
        for cell in VllmTasks(load, VLLM, lambda: engine, Results({}), steps=50)._under(10)
        if cell["case"]["name"] == "served_try"
    ]
    assert [(cell["case"]["budget"], cell["tbt_p99_ms"]) for cell in tried] == [
        (144, 9), (160, 10), (176, 31),
    ]  # fmt: skip
    assert [budget for budget, _ in engine.seen[:5]] == [144, 144, 160, 160, 176]


def test_ratios_are_over_stock_and_a_missed_limit_is_told() -> None:
    rates = {
        (VLLM, "15ms"): (10, 14.9), (OURS, "15ms"): (20, 15.2), (ATTENTION, "15ms"): (11, 14),
        (VLLM, "20ms"): (3, 20.1), (OURS, "20ms"): (12, 19),
    }  # fmt: skip
    cells = [
        LOAD.cell("served", provider, value, "tokens/ms", limit=limit) | {"tbt_p99_ms": p99}
        for (provider, limit), (value, p99) in rates.items()
    ]
    cells += [LOAD.cell("decode_alone", x, ms, "ms") for x, ms in ((VLLM, 10), (ATTENTION, 8))]
    rows = summarize(cells)
    assert rows["qwen3-8b smkern_over_vllm_15ms"] == {
        "value": 2.0, "target": 1.9, "met": False, "cells": 2, "missed": {OURS: 15.2},
    }  # fmt: skip
    assert rows["qwen3-8b smkern_over_vllm_20ms"] == {
        "value": None, "target": 1.4, "met": True, "cells": 2, "missed": {VLLM: 20.1},
    }  # fmt: skip
    assert rows["qwen3-8b vllm+smkern_over_vllm_15ms"]["value"] == 1.1
    assert rows["qwen3-8b vllm+smkern_over_vllm_decode_alone"]["value"] == 1.25
    assert "qwen3-8b vllm+smkern_over_vllm_prefill_alone" not in rows


def test_fp8_is_compared_with_stock_vllm_in_fp8() -> None:
    cells = [
        LOAD.cell("served", provider, rate, "tokens/ms", limit="15ms") | {"tbt_p99_ms": 14.0}
        for provider, rate in ((VLLM, 5.0), (FP8, 8.0), (FP8_LINEAR, 12.0))
    ]
    cells += [LOAD.cell("decode_alone", x, ms, "ms") for x, ms in ((FP8, 6), (FP8_LINEAR, 5))]
    rows = {name: row["value"] for name, row in summarize(cells).items()}
    assert rows["qwen3-8b vllm-fp8+linear_over_vllm-fp8_15ms"] == 1.5
    assert rows["qwen3-8b vllm-fp8+linear_over_vllm-fp8_decode_alone"] == 1.2
    assert rows["qwen3-8b smkern_over_vllm_15ms"] is None, "not measured yet"
    rows = summarize([cell for cell in cells if cell["provider"] != VLLM])
    assert "qwen3-8b smkern_over_vllm_15ms" not in rows, "neither was to be measured"


def test_models_are_rows_of_their_own() -> None:
    loads = {LOAD: 10.0, EngineLoad("qwen3-32b", limits_ms=(15,)): 4.0}
    cells = [
        load.cell("served", provider, rate * more, "tokens/ms", limit="15ms")
        | {"tbt_p50_ms": 13.0, "tbt_p99_ms": 14.0}
        for load, rate in loads.items()
        for provider, more in ((VLLM, 1.0), (OURS, 1.5))
    ]
    rows = summarize(cells)
    assert {name: (x["value"], x["target"]) for name, x in rows.items()} == {
        "qwen3-8b smkern_over_vllm_15ms": (1.5, 1.9),
        "qwen3-32b smkern_over_vllm_15ms": (1.5, None),
    }
    _, _, *table = engines_table(cells[::-1]).splitlines()
    assert [row.split(" | ")[:2] for row in table] == [
        ["| qwen3-8b, 15 ms: vLLM, stock", "10.0"],
        ["| qwen3-8b, 15 ms: smkern's `Multiplexer`", "15.0"],
        ["| qwen3-32b, 15 ms: vLLM, stock", "4.0"],
        ["| qwen3-32b, 15 ms: smkern's `Multiplexer`", "6.0"],
    ]


def test_a_task_that_fails_is_a_cell_and_is_measured_again(tmp_path, monkeypatch) -> None:
    engines = iter([None, Engine()])

    def failing(load: EngineLoad, provider: str, results: Results, steps: int) -> VllmTasks:
        engine = next(engines)

        def make() -> Engine:
            if engine is None:
                raise OSError("no such engine")
            return engine

        return VllmTasks(load, provider, make, results, steps)

    monkeypatch.setattr(suite, "vllm_tasks", failing)
    monkeypatch.setattr(Progress, "start", lambda _: None)
    results = Results({})
    output = Output(tmp_path / "engines.json")
    assert measure_engine(VLLM, LOAD, results, output, 200) == 0
    assert {cell["error"] for cell in results.cells} == {"OSError: no such engine"}
    measure_engine(VLLM, LOAD, results, output, 200)
    assert not [cell for cell in results.cells if cell.get("error")]


@pytest.mark.parametrize("name", ["sglang", "vllm:40", "vllm+"])
def test_an_engine_that_there_is_not(name: str) -> None:
    assert known_names(None, PROVIDERS, "engine") == PROVIDERS
    with pytest.raises(UnknownNameError, match=f"no engine is named '{re.escape(name)}'"):
        known_names(f"vllm,{name}", PROVIDERS, "engine")


def test_linear_layers_come_with_the_attention() -> None:
    assert vllm_options(VLLM) == {}
    assert vllm_options(LINEAR) == vllm_options(ATTENTION) | {"quantization": "smkern"}
    assert vllm_options(FP8_LINEAR) == vllm_options(LINEAR) | vllm_options(FP8)


def test_the_table_says_who_missed_a_limit_and_by_which_setting_a_rate_was_had() -> None:
    cells = [
        LOAD.cell("served", x, rate, "tokens/ms", limit="15ms")
        | {"tbt_p50_ms": 13.0, "tbt_p99_ms": p99, **more}
        for x, rate, p99, more in (
            (OURS, 15.4, 15.2, {"watts": 650.0}), (VLLM, 7.25, 14.7, {"budget": 160}),
            (LINEAR, 9.0, 14.0, {"budget": 320}),
        )
    ]  # fmt: skip
    _, _, *rows = engines_table(cells).splitlines()
    assert rows == [
        "| qwen3-8b, 15 ms: vLLM, stock | 7.2 | 13.0 | 14.7 | 160 tokens a step |  |",
        "| qwen3-8b, 15 ms: vLLM, + linear layers | 9.0 | 13.0 | 14.0 | 320 tokens a step |  |",
        "| qwen3-8b, 15 ms: smkern's `Multiplexer` | 15.4 | 13.0 | **15.2** | the limit | 650 |",
    ]
    alone = [LOAD.cell("decode_alone", VLLM, 10.18, "ms"), LOAD.cell("prefill_alone", VLLM, 40, "")]
    assert alone_table(alone).splitlines()[-1] == "| qwen3-8b: vLLM, stock | 10.18 | 40.00 |"
