"""The runtime's tables and pictures, from made-up cells."""

from __future__ import annotations

from smkern.bench.plots import draw
from smkern.bench.results import Results
from smkern.bench.runtime.cases import PLANS
from smkern.bench.runtime.rows import gains
from smkern.bench.tables.runtime import (
    VARIANTS,
    ablation_table,
    costs_table,
    gains_table,
    served_table,
    steady_table,
)

PLAN = PLANS[0]


def cells():
    found = []
    for provider, factor in (("smkern", 1.0), ("stock", 0.7)):
        for rung, tokens, ms in ((24, 30.0, 18.0), (40, 24.0, 14.0)):
            cell = PLAN.cell("steady", provider, tokens * factor, "tokens/ms", rung=rung)
            found.append(cell | {"tbt_p50_ms": ms, "tbt_p99_ms": ms + 0.4, "alone_ms": ms - 3})
        for limit, tokens in ((15, 18.0), (20, 26.0)):
            cell = PLAN.cell(
                "aggregated", provider, tokens * factor, "tokens/ms", limit_ms=limit, margin=1.0
            )
            found.append(
                cell | {"tbt_p50_ms": limit - 0.3, "tbt_p99_ms": limit - 0.1, "chunk": 256.0}
            )
        found.append(PLAN.cell("prefill_alone", provider, 38 * factor, "tokens/ms"))
    curve = PLAN.cell("mixed_forward", "smkern", 13.2, "ms", rows=320)
    found.append(curve | {"chunk": 256, "by_start_ms": {"0": 13.0, "3840": 13.4}})
    found.append(PLAN.cell("host_us_per_step", "smkern", 120.5, "us"))
    found.append(PLAN.cell("layerwise_overhead_fraction", "smkern", 0.004, "fraction", beside=True))
    found.append(PLAN.cell("shared_queue", "smkern", 1, "bool", rung=24))
    found.append(PLAN.cell("token_mismatches", "smkern", 0, "tokens", layers=4))
    for at, variant in enumerate(VARIANTS):
        for n in (50, 99):
            name = f"ablation_tbt_p{n}_ms"
            cell = PLAN.cell(name, "smkern", 15.0 + at + n / 50, "ms", variant=variant)
            found.append(cell | {"tokens_per_ms": 25.0})
    return [*found, *gains(found)]


def test_a_row_a_limit_with_stock_kernels_beside():
    table = gains_table(cells())
    row = "| qwen3-8b, 15 ms | 18.0 (256) | 24.0 (40) | **1.33** | 1.33 | 1.50 | 2.11 | 12.6, 16.8"
    assert row in table
    assert "| qwen3-8b, 20 ms | 26.0 (256) | 30.0 (24) | **1.15** | 1.15 | 1.30 | 1.46" in table


def test_a_limit_that_no_rung_keeps_is_a_row():
    chunks = PLAN.cell("aggregated", "smkern", 6.0, "tokens/ms", limit_ms=12, margin=1.0)
    chunks |= {"tbt_p50_ms": 11.8, "tbt_p99_ms": 12.1, "chunk": 64.0}
    wanted = "| qwen3-8b, 12 ms | 6.0 (64) | none keeps it | none* |  |  |  |  |  |"
    assert wanted in gains_table([*cells(), chunks])


def test_stock_kernels_say_what_they_do_not_keep():
    chunks = PLAN.cell("aggregated", "smkern", 6.0, "tokens/ms", limit_ms=16, margin=1.0)
    chunks |= {"tbt_p50_ms": 15.8, "tbt_p99_ms": 15.9, "chunk": 64.0}
    found = [c for c in cells() if not c["case"]["name"].startswith("mux")]
    for cell in found:
        if cell["provider"] == "stock" and cell["case"]["name"] == "steady":
            cell["tbt_p99_ms"] = 20.5
            cell["tbt_p50_ms"] += 1.5
    row, _, late = gains_table([*found, chunks, *gains([*found, chunks])]).splitlines()[2:]
    assert row.endswith("| 12.6, none | none |")
    assert late.endswith("| 18.2, 21.0 | 1.15* |"), "the median keeps it, 99 of 100 steps do not"


def test_what_requests_meet():
    cell = PLAN.cell("served", "smkern", 27.3, "tokens/ms", policy="static_split", limit="20ms")
    cell |= {"setting": 26, "tbt_p50_ms": 22.07, "tbt_p99_ms": 24.06, "tbt_max_ms": 25.5}
    cell |= {"sm_mhz": 1467.2, "watts": 699.6}
    other = PLAN.cell("served", "smkern", 19.1, "tokens/ms", policy="adaptive", limit="20ms")
    other |= {"tbt_p50_ms": 18.89, "tbt_p99_ms": 19.9, "tbt_max_ms": 31.0}
    table = served_table([cell, other])
    row = "| `static_split`, 26 | 22.07 | 24.06 | 25.50 | **no** | 27.3 | 1467, 700 |"
    assert f"| qwen3-8b, 20 ms {row}" in table
    assert "| qwen3-8b, 20 ms | `adaptive` | 18.89 | 19.90 | 31.00 | p99 | 19.1 |  |" in table


def test_steps_and_rates_by_rung():
    table = steady_table(cells())
    assert "qwen3-8b, smkern; alone on the whole device 38.0 tokens/ms:" in table
    assert "| beside, p50 | 18.00 | 14.00 |" in table
    assert "qwen3-8b, stock kernels" in table


def test_costs_have_their_limits():
    table = costs_table(cells())
    assert "| qwen3-8b: host time of a step, 128 requests decode, p50, us | 120.5 | 150 |" in table
    assert "over one launch, minus 1, beside decode | 0.004 | 0.01 |" in table
    assert "each request alone, 4 layers | 0 | 0 |" in table
    assert "| rungs whose lanes share a hardware queue | 1 of 1 |  |" in table


def test_the_ablation_lists_every_variant():
    table = ablation_table(cells())
    assert table.count("\n") == 1 + len(VARIANTS)
    assert "| a step at a time | 20.00 | 20.98 | 25.0 |" in table


def test_pictures(tmp_path):
    results = Results(meta={"gpu": "NVIDIA H200"})
    for cell in cells():
        results.add(cell)
    written = draw("runtime", results, tmp_path)
    assert [path.name for path in written] == ["runtime-steady.png", "runtime-ablation.png"]
