"""The model suite's cases, rows, tables and pictures, from made-up cells."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.bench.model.cases import (
    PLANS,
    DecodeCase,
    ModelPlan,
    PrefillCase,
    limit_of,
    plans_named,
)
from smkern.bench.model.rows import summarize
from smkern.bench.plots import draw
from smkern.bench.results import Results
from smkern.bench.tables.models import breakdown_table, decode_table, prefill_table

Cell = dict[str, Any]


def step(num_sms: int, over: float, batch: int = 64, **case: Any) -> Cell:
    about = DecodeCase("qwen3-8b", batch, **case).about
    return {
        "op": "decode_step", "case": about, "num_sms": num_sms, "mode": "green",
        "placement": "spread", "group_sms": num_sms, "provider": "smkern", "us": 1e4 * over,
        "floor_us": 1e4, "over_floor": over, "fraction_of_ceiling": 1 / over,
    }  # fmt: skip


def prompt(num_sms: int, per_sm: float, **values: Any) -> Cell:
    about = PrefillCase("qwen3-8b", 8192, beside=values.pop("beside", None)).about
    return {
        "op": "prefill", "case": about, "num_sms": num_sms, "mode": "green", "provider": "smkern",
        "us": 2e5, "tflops": per_sm * num_sms, "tflops_per_sm": per_sm, "tokens_per_ms": 41.0,
    } | values  # fmt: skip


def cells() -> list[Cell]:
    return [
        step(16, 1.55),
        step(16, 1.62, batch=128),
        step(132, 1.28, batch=1),
        step(132, 1.15),
        step(132, 1.21, overlap=False),
        step(16, 1.71, beside="prefill 1x8192"),
        prompt(116, 30.1, beside="decode 64x2048", beside_sms=16, tokens_per_ms=30.06),
        prompt(60, 6.1, of_gemm=0.83, of_chip=1.13, gemm_tflops=440.0),
        prompt(132, 5.4, of_gemm=0.79, of_chip=1.0, gemm_tflops=900.0),
        {"op": "layer_launch", "case": {"model": "qwen3-8b", "batch": 1}, "num_sms": 16,
         "provider": "smkern", "value": 101.0, "unit": "us"},
    ]  # fmt: skip


def test_cases():
    plan = PLANS[0]
    assert plan.batches == (1, 32, 64, 128)
    assert DecodeCase("qwen3-8b", 64).about == {
        "model": "qwen3-8b", "batch": 64, "context": 2048, "beside": None, "overlap": True,
    }  # fmt: skip
    assert plan.prompt.forward.tokens == 8192
    assert plan.within((16, 116)) == ModelPlan(plan.model, plan.batches, 8192, (16,), (116,))
    for name in ("qwen3-32b", "qwen3-8b-fp8+fp8-kv", "qwen3-8b+fp8-tensor"):
        assert [found.model for found in plans_named([name])] == [name]
    with pytest.raises(ValueError, match="no model is named 'gpt-2'"):
        plans_named(["gpt-2"])


def test_limits():
    assert limit_of(132, 1) == 1.30
    assert [limit_of(n, 64) for n in (132, 48, 32, 24, 16, 60)] == [1.2, 1.25, 1.45, 1.5, 1.6, None]


def test_rows():
    rows = summarize(cells())
    worst = rows["decode_over_floor_16_sms"]
    assert (worst["value"], worst["target"], worst["met"], worst["cells"]) == (1.62, 1.6, False, 2)
    assert worst["worst"][0]["batch"] == 128
    assert rows["decode_over_floor_132_sms"]["value"] == 1.15
    assert rows["decode_over_floor_132_sms_batch_1"]["met"] is True
    assert rows["decode_beside_over_alone"]["value"] == pytest.approx(1.71 / 1.55, rel=1e-3)
    assert rows["overlap_gain"]["value"] == pytest.approx(1.21 / 1.15, rel=1e-3)
    assert (rows["prefill_of_gemm_rate"]["value"], rows["prefill_of_gemm_rate"]["met"]) == (
        0.79,
        False,
    )
    assert rows["prefill_per_sm_of_chip"]["met"] is True
    assert rows["layer_launch_us"]["met"] is True
    assert rows["not_measured"] == []
    assert summarize([]) == {}


def test_fp8_is_compared_with_bf16():
    def in_fp8(cell: Cell, model: str, us: float) -> Cell:
        return cell | {"case": cell["case"] | {"model": model}, "us": us, "over_floor": 9.0}

    def as_fp8(cell: Cell, us: float) -> Cell:
        return in_fp8(cell, "qwen3-8b-fp8", us)

    found = cells()
    (slow,) = (c for c in found if c["op"] == "prefill" and c["num_sms"] == 132)
    found += [as_fp8(step(16, 1.55), 1.55e4 * 0.8), as_fp8(step(16, 1.62, batch=128), 3e4)]
    found += [in_fp8(step(132, 1.0), "qwen3-8b-fp8+fp8-kv", 1.15e4 * 0.58)]
    found += [as_fp8(step(16, 1.0, beside="prefill 1x8192"), 9e4), as_fp8(step(24, 1.0), 9e4)]
    found += [as_fp8(slow, 1e5), as_fp8(slow | {"num_sms": 60}, 1e6)]
    four = slow | {"case": slow["case"] | {"tokens": 2048, "batch": 4}}
    found += [four, as_fp8(four, 1.4e5)]
    rows = summarize(found)
    assert rows["decode_over_floor_16_sms"] == summarize(cells())["decode_over_floor_16_sms"]
    wanted = {
        "fp8_decode_over_bf16_16_sms": (0.8, 0.76, False),
        "fp8_decode_over_bf16_24_sms": (None, 0.78, None),
        "fp8+fp8-kv_decode_over_bf16_132_sms": (0.58, 0.6, True),
        "fp8_prefill_times_bf16": (2.0, 1.4, True),
        "fp8_prefill_4_prompts_times_bf16": (1.4286, 1.45, False),
    }
    for name, (value, target, met) in wanted.items():
        row = rows[name]
        assert (row["value"], row["target"], row["met"]) == (value, target, met), name
    assert not any(name.startswith("fp8") for name in summarize(cells()))


def test_a_cell_without_a_time_is_named():
    failed = step(24, 1.0) | {"us": None, "over_floor": None, "error": "why"}
    rows = summarize([failed])
    assert rows["not_measured"] == [
        {"op": "decode_step", "model": "qwen3-8b", "batch": 64, "context": 2048, "num_sms": 24,
         "error": "why"}
    ]  # fmt: skip


def test_decode_table_has_limit_and_both_sides():
    lines = decode_table(cells()).splitlines()
    assert lines[0] == "| ms (x floor) \\ SMs | 16 | 132 |"
    assert "| qwen3-8b 64 x 2048, alone | 15.50 (1.55) | 11.50 (1.15) |" in lines
    assert "| qwen3-8b 64 x 2048, no overlap |  | 12.10 (1.21) |" in lines
    assert "| qwen3-8b 64 x 2048, beside a prefill | 17.10 (1.71) + 30.1/ms |  |" in lines
    assert "| qwen3-8b 128 x 2048, alone | 16.20 (**1.62**) |  |" in lines
    assert lines[-1] == "| **limit** | 1.60 | 1.20 or 1.30 |"


def test_prefill_table():
    lines = prefill_table(cells()).splitlines()
    assert lines[0] == "| prefill \\ SMs | 60 | 132 |"
    assert "| qwen3-8b 1 x 8192, TFLOP/s an SM | 6.10 | 5.40 |" in lines
    assert "| qwen3-8b 1 x 8192, of our GEMM's rate | 0.83 | 0.79 |" in lines


def test_breakdown_table_sums_the_step():
    case = DecodeCase("qwen3-8b", 64).about
    found = [
        {"op": "decode_kernel", "case": case | {"kernel": "qkv"}, "num_sms": 16, "us": 30.0,
         "floor_us": 20.0, "count": 36},
        {"op": "decode_kernel", "case": case | {"kernel": "sample"}, "num_sms": 16, "us": 20.0,
         "floor_us": 0.0, "count": 1},
    ]  # fmt: skip
    text = breakdown_table(found)
    assert "qwen3-8b, 64 x 2048:" in text
    assert "| qkv x 36 | 30.0 (1.50) |" in text
    assert "| sample | 20.0 |" in text
    assert "| **sum, ms** | 1.10 |" in text


@pytest.mark.slow
def test_pictures(tmp_path):
    results = Results(meta={"gpu": "NVIDIA H200"})
    for cell in cells():
        results.add(cell)
    assert [path.name for path in draw("model", results, tmp_path)] == [
        "model-decode.png",
        "model-prefill.png",
    ]
