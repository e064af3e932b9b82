"""The runtime suite's subjects that serve requests, in miniature on CPU tensors."""

from __future__ import annotations

from functools import cache

from smkern.bench.runtime.cases import PLANS
from smkern.bench.runtime.served import ablation_cells, host_cells, memory_cells, served_cells
from smkern.bench.runtime.workload import Sizes, Workload, budgets_of, step_rows
from smkern.models import Weights
from tests.models.generation import tiny

PLAN = PLANS[0]
SIZES = Sizes((40,), max_running=6, max_prefill=3, max_tokens=48, max_context=192, num_pages=64)
WORKLOAD = Workload(running=3, context=8, prompt=20)


@cache
def weights(layers=None) -> Weights:
    return Weights.random(tiny(num_layers=layers or 2), 3)


def test_host_time_of_a_step():
    (cell,) = host_cells(PLAN, weights(), 0.05, sizes=SIZES, workload=WORKLOAD)
    assert cell["case"] == {"model": "qwen3-8b", "name": "host_us_per_step"}
    assert 0 < cell["value"] <= cell["p99"]
    assert cell["two_steps_p50"] > 0
    assert cell["gaps"] >= 8


def test_each_technique_off_in_turn():
    cells = list(ablation_cells(PLAN, weights(), 0.05, sizes=SIZES, workload=WORKLOAD))
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
            PLAN,
            weights(),
            0.05,
            [gain | {"rung": 40, "chunk": 8.0}],
            sizes=SIZES,
            workload=WORKLOAD,
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


def test_every_bucket_and_both_sides_are_compiled():
    assert step_rows(48) == [1, 2, 4, 8, 16, 32, 48]
    decode, prefill = budgets_of((40, 96), 132)
    assert [(b.num_sms, b.clusters) for b in decode] == [(132, True), (40, False), (96, True)]
    assert [b.num_sms for b in prefill] == [132, 92, 36]
