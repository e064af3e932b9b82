"""The attention suite's rows, tables and pictures, from made-up cells."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from smkern.bench.attention.cases import (
    CASES,
    COLD,
    FOUR_PROMPTS,
    LONG,
    ONE_PROMPT,
    SKEWED,
    UNIFORM,
    UNIFORM_FP8,
)
from smkern.bench.attention.rows import DECODE_TBPS, summarize
from smkern.bench.plots import command as plot_command
from smkern.bench.plots import operators as plots
from smkern.bench.results import Results
from smkern.bench.tables.operators import (
    attention_ratios_table,
    decode_rates_table,
    plan_table,
    prefill_rates_table,
)
from smkern.measure.attention import BUDGETS, AttentionCase
from tests.bench.synthetic import where

Cell = dict[str, Any]


def cell(case: AttentionCase, num_sms: int, us: float, provider: str = "smkern", **more: Any):
    made: Cell = (
        {"op": "paged_attention", "case": case.about}
        | where(num_sms)
        | {
            "provider": provider,
            "us": us,
            "tbps": case.bytes_moved / us / 1e6,
            "tflops": case.flops / us / 1e6,
            "fraction_of_ceiling": 0.5,
        }
    )
    return made | more


def at_tbps(case: AttentionCase, num_sms: int, tbps: float, **more: Any) -> Cell:
    return cell(case, num_sms, case.bytes_moved / tbps / 1e6, **more)


def test_the_slowest_streamed_case_counts():
    cells = [at_tbps(UNIFORM, 16, 1.9), at_tbps(SKEWED, 16, 1.8), at_tbps(LONG, 16, 1.65)]
    rows = summarize([*cells, at_tbps(COLD, 16, 0.5)])
    row = rows["decode_tbps_16_sms"]
    assert (row["value"], row["target"], row["met"], row["cells"]) == (1.65, 1.7, False, 3)
    assert row["worst"][0] == {"case": LONG.name, "num_sms": 16, "value": 1.65}
    assert rows["decode_skewed_over_uniform"]["value"] == pytest.approx(0.9474)
    assert rows["decode_skewed_over_uniform"]["met"] is False
    assert rows["decode_tbps_24_sms"]["met"] is None
    assert DECODE_TBPS == {16: 1.7, 24: 2.45, 32: 3.0, 48: 3.65, 64: 3.95}


def test_from_84_sms_on_all_budgets_count():
    rows = summarize([at_tbps(UNIFORM, n, 4.0 + n / 1e4) for n in (84, 100, 116, 132)])
    row = rows["decode_tbps_from_84_sms"]
    assert (row["value"], row["met"], row["cells"]) == (4.0084, True, 4)


def test_cold_cells_are_in_microseconds_at_most():
    rows = summarize([cell(COLD, 16, 26.0), cell(COLD, 132, 16.1)])
    assert rows["decode_cold_us_16_sms"]["met"] is True
    assert rows["decode_cold_us_132_sms"]["met"] is False


def test_flashinfer_rows_take_the_second_measurement():
    cells = [
        cell(UNIFORM, 16, 1.0, vs_flashinfer=0.9, vs_flashinfer_again=1.1),
        cell(SKEWED, 16, 1.0, vs_flashinfer=2.2),
        cell(ONE_PROMPT, 16, 1.0, vs_flashinfer=0.1),
        cell(UNIFORM, 16, 1.0, provider="smkern:triton", vs_flashinfer=0.1),
    ]
    rows = summarize(cells)
    assert rows["decode_geomean_vs_flashinfer"]["value"] == pytest.approx(1.5556, abs=1e-4)
    assert rows["decode_worst_vs_flashinfer"]["value"] == 1.1
    assert rows["vs_flashinfer_by_case"][ONE_PROMPT.name] == {"16": 0.1}


def test_prefill_rates_an_sm_are_relative_to_the_whole_chip():
    cells = [cell(ONE_PROMPT, 132, 1000.0), cell(ONE_PROMPT, 66, 2000.0 / 0.95)]
    cells += [cell(FOUR_PROMPTS, 66, 2000.0)]
    row = summarize(cells)["prefill_rate_an_sm_over_132"]
    assert (row["value"], row["met"], row["cells"]) == (0.95, True, 1)


def test_fa3_limits_by_budget():
    cells = [
        cell(ONE_PROMPT, n, 1.0, vs={"flashinfer:fa3": ratio, "flashinfer:fa2": 0.1})
        for n, ratio in ((84, 0.96), (100, 0.99), (116, 1.2))
    ]
    rows = summarize(cells)
    met = [rows[f"prefill_vs_fa3_{n}_sms"]["met"] for n in (84, 100, 116)]
    assert met == [True, False, True]


def test_fp8_speedup_and_plan():
    plan = {"op": "plan_attention", "case": UNIFORM.about, "provider": "smkern"}
    cells = [cell(UNIFORM, 48, 170.0), cell(UNIFORM_FP8, 48, 100.0)]
    cells += [plan | {"num_sms": n, "group_sms": n, "us": us} for n, us in ((16, 4.0), (132, 5.5))]
    rows = summarize(cells)
    assert rows["fp8_over_bf16_48_sms"] == {"value": 1.7, "target": 1.6, "met": True, "cells": 1}
    assert rows["fp8_over_bf16_16_sms"]["met"] is None
    assert (rows["plan_us"]["value"], rows["plan_us"]["met"]) == (5.5, False)


def test_beside_a_neighbour_the_readers_share_counts_and_no_other_row_moves():
    beside = cell(UNIFORM, 24, 500.0, fraction_of_beside_floor=0.8)
    beside |= {"op": "paged_attention_beside", "case": UNIFORM.about | {"beside": "dense"}}
    alone = [at_tbps(UNIFORM, 24, 2.9)]
    rows, before = summarize([*alone, beside]), summarize(alone)
    row = rows.pop("decode_beside_over_reader_24_sms")
    assert (row["value"], row["met"], row["cells"]) == (0.8, False, 1)
    assert before.pop("decode_beside_over_reader_24_sms")["value"] is None
    assert rows == before


def test_cells_that_failed_are_listed_and_do_not_count():
    failed = cell(UNIFORM, 16, 1.0) | {"us": None, "tbps": None, "tflops": None, "error": "why"}
    rows = summarize([failed])
    assert rows["not_measured"] == [{"case": UNIFORM.name, "num_sms": 16, "error": "why"}]
    assert rows["decode_tbps_16_sms"]["cells"] == 0
    assert summarize([]) == {}


def whole_file() -> Results:
    results = Results(meta={"gpu": "NVIDIA H200"})
    for case in CASES:
        for num_sms in BUDGETS:
            us = 1e5 / num_sms
            results.add(cell(case, num_sms, us, vs_flashinfer=2.0))
            for placement in ("spread", "default"):
                slower = 3.0 if placement == "spread" else 2.0
                peer = cell(case, num_sms, us * slower, "flashinfer:fa2", placement=placement)
                results.add(peer)
            plan = {"op": "plan_attention", "us": 3.25, "vs_flashinfer": None}
            results.add(cell(case, num_sms, us) | plan)
    return results


def test_tables():
    cells = whole_file().cells
    decode = decode_rates_table(cells).splitlines()
    prefill = prefill_rates_table(cells).splitlines()
    assert decode[0] == "| TB/s \\ SMs | 16 | 24 | 32 | 48 | 64 | 84 | 100 | 116 | 132 |"
    assert decode[2].startswith(f"| {UNIFORM.name}, smkern | 0.17 |")
    assert decode[3].startswith(f"| {UNIFORM.name}, FlashInfer FA2 | 0.09 |")
    assert any(line.startswith(f"| {COLD.name} (us), smkern | 6250.0 |") for line in decode)
    assert len(prefill) == 2 + 2 * 5
    assert attention_ratios_table(cells).splitlines()[2].startswith(f"| {UNIFORM.name} | 2.00 |")
    assert "| 3.2 |" in plan_table(cells)


@pytest.mark.slow
def test_pictures(tmp_path):
    whole_file().save(tmp_path / "attention.json")
    ran = CliRunner().invoke(plot_command, ["--results", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"attention-decode.png", "attention-prefill.png"}


def test_a_picture_takes_the_peers_better_partition_and_the_floor():
    cells = [c for c in whole_file().cells if c["case"]["name"] == UNIFORM.name]
    measured = [c for c in cells if c["op"] == "paged_attention"]
    ours = plots.best(measured, "smkern", "tbps")
    assert plots.best(measured, "flashinfer:fa2", "tbps")[16] == pytest.approx(ours[16] / 2)
    assert plots.ideal(measured, "tbps")[16] == pytest.approx(2 * ours[16])
