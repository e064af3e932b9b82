"""The runtime suite's subjects that serve requests, in miniature on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from smkern.bench.runtime.cases import PLANS
from smkern.bench.runtime.correct import Equality, soak_cells, token_cells
from smkern.bench.runtime.prepare import budgets_of, step_problems
from smkern.bench.runtime.served import ablation_cells, host_cells, memory_cells, served_cells
from smkern.bench.runtime.serving import Crowd, Sizes
from smkern.models import Weights, preset
from tests.models.generation import one_thread, tiny

PLAN = PLANS[0]
SIZES = Sizes((40,), max_running=6, max_prefill=3, max_tokens=48, max_context=192, num_pages=64)
CROWD = Crowd(running=3, context=8, prompt=20)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with one_thread():
        yield


@cache
def weights(layers=None) -> Weights:
    return Weights.random(tiny(num_layers=layers or 2), 3)


def test_host_time_of_a_step():
    (cell,) = host_cells(PLAN, weights(), 0.05, sizes=SIZES, crowd=CROWD)
    assert cell["case"] == {"model": "qwen3-8b", "name": "host_us_per_step"}
    assert 0 < cell["value"] <= cell["p99"]
    assert cell["two_steps_p50"] > 0
    assert cell["gaps"] >= 8


def test_each_technique_off_in_turn():
    cells = list(ablation_cells(PLAN, weights(), 0.05, sizes=SIZES, crowd=CROWD))
    variants = list(dict.fromkeys(cell["case"]["variant"] for cell in cells))
    assert variants == [
        "all", "layerwise_off", "polling_off", "layerwise_and_polling_off", "lookahead_off",
        "all_off",
    ]  # fmt: skip
    assert {cell["case"]["name"] for cell in cells} == {
        "ablation_tbt_p50_ms",
        "ablation_tbt_p99_ms",
    }
    assert all(cell["value"] > 0 and cell["tokens_per_ms"] >= 0 for cell in cells)


def test_the_steady_state_through_the_multiplexer():
    gain = PLAN.cell("mux_over_aggregated_15ms", "smkern", 1.5, "ratio")
    cells = list(
        served_cells(
            PLAN, weights(), 0.05, [gain | {"rung": 40, "chunk": 8.0}], sizes=SIZES, crowd=CROWD
        )
    )
    assert [(c["case"]["policy"], c["case"]["limit"]) for c in cells] == [
        ("aggregated", "15ms"),
        ("fixed_split", "15ms"),
    ]
    assert all(cell["value"] >= 0 and cell["tbt_p50_ms"] > 0 for cell in cells)


def test_memory_of_graphs_of_which_a_cpu_has_none():
    (cell,) = memory_cells(PLAN, weights(), sizes=SIZES)
    assert (cell["value"], cell["graphs"], cell["unit"]) == (0.0, 0, "MiB")


def test_tokens_are_those_of_each_request_alone():
    sizes = replace(SIZES, rungs=(16, 48), batch_invariant=True, num_pages=20, max_context=96)
    wanted = Equality(24, layers=2, sizes=sizes, longest=40)
    (cell,) = token_cells(PLAN, weights, wanted)
    assert (cell["value"], cell["failed"], cell["wrong"]) == (0, [], [])
    assert cell["case"]["layers"] == 2
    assert (cell["case"]["requests"], cell["tokens"] > 24) == (24, True)


def test_fast_tokens_differ_only_where_rounding_decides():
    sizes = replace(SIZES, rungs=(16, 48), num_pages=20, max_context=96)
    wanted = Equality(12, layers=2, sizes=sizes, longest=40, is_fast=True)
    (cell,) = token_cells(PLAN, weights, wanted)
    assert cell["case"] == {
        "model": "qwen3-8b",
        "name": "token_mismatches",
        "requests": 12,
        "layers": 2,
        "mode": "fast",
    }
    assert (cell["value"], cell["failed"], cell["clear"] > 0) == (0, [], True)


def test_a_soak_is_carried_on(tmp_path):
    path = tmp_path / "runtime.soak"
    sizes = replace(SIZES, rungs=(16, 48), num_pages=20, max_context=96)
    for count in (1, 2):
        minutes, leaks = soak_cells(
            PLAN, weights, path, 0.2, sizes=sizes, layers=2, say=lambda line: None, longest=40
        )
        assert minutes["segments"] == count
        assert (leaks["value"], leaks["leaks"]) == (None, []), "too short to tell"
    assert (minutes["value"], minutes["unjudged_minutes"] > 0) == (0, True)
    assert minutes["requests"] > 12


def test_a_soak_remembers_what_raised(tmp_path):
    path = tmp_path / "runtime.soak"
    sizes = replace(SIZES, rungs=(16, 48), num_pages=20, max_context=96)
    some = {"sizes": sizes, "layers": 2, "longest": 40}

    def hot(line):
        raise RuntimeError("hot")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smkern.bench.runtime.soak.SAMPLE_S", 0.01)
        cells = soak_cells(PLAN, weights, path, 0.2, say=hot, **some)
        assert [next(cells)["value"], next(cells)["value"]] == [0, 1]
        with pytest.raises(RuntimeError, match="hot"):
            next(cells)
    _, leaks = soak_cells(PLAN, weights, path, 0.2, say=lambda line: None, **some)
    assert (leaks["value"], leaks["leaks"]) == (1, ["segment 0: RuntimeError: hot"])


def test_every_bucket_and_both_sides_are_compiled():
    config = preset("qwen3-8b")
    assert {p.m for p in step_problems(config, 48)} == {1, 2, 4, 8, 16, 32, 48}
    decode, prefill = budgets_of((40, 96), 132)
    assert [(b.num_sms, b.clusters) for b in decode] == [(132, True), (40, False), (96, True)]
    assert [b.num_sms for b in prefill] == [132, 92, 36]
