from __future__ import annotations

import json

import pytest

from smkern.bench.gemm_rows import is_losing, settled_ratio, summarize
from smkern.bench.rows import geomean
from tests.bench.synthetic import cell


def test_geomean():
    assert geomean([]) is None
    assert geomean([2.0, 8.0]) == pytest.approx(4.0)


def test_geomeans_and_targets_per_provider():
    cells = [cell(vs_cublas=1.0), cell(vs_cublas=1.44, num_sms=16)]
    cells += [cell("smkern:triton", vs_cublas=1.05)]
    rows = summarize(cells)["geomean_vs_cublas"]
    assert rows["smkern"] == {"value": 1.2, "target": 1.2, "met": True, "cells": 2}
    assert rows["smkern:triton"] == {"value": 1.05, "target": 1.10, "met": False, "cells": 1}


def test_the_second_measurement_of_a_losing_cell_counts_and_the_first_stays():
    lost = cell(vs_cublas=0.95, vs_cublas_again=0.99)
    assert is_losing(lost)
    assert settled_ratio(lost) == 0.99
    row = summarize([lost, cell(vs_cublas=1.3, m=64)])["worst_vs_cublas"]["smkern"]
    assert (row["value"], row["met"], row["losing"], row["losing_at_first"]) == (0.99, True, 0, 1)
    assert row["worst"][0]["vs_cublas"] == 0.95


@pytest.mark.parametrize(
    ("provider", "ratio", "loses"),
    [
        ("smkern", 0.96, True),
        ("smkern", 0.97, False),
        ("smkern:triton", 0.91, False),
        ("smkern:triton", 0.89, True),
        ("smkern:model", 0.5, False),
        ("smkern", None, False),
    ],
)
def test_what_loses(provider, ratio, loses):
    assert is_losing(cell(provider, vs_cublas=ratio)) is loses


def test_tensor_fraction_takes_the_worst_cell_up_to_60_sms():
    good = cell(tflops=0.9 * 8.1 * 60)
    bad = cell(tflops=0.8 * 8.1 * 16, num_sms=16)
    wide = cell(tflops=0.1, num_sms=72)
    small = cell(tflops=0.1, m=1024)
    row = summarize([good, bad, wide, small])["tensor_fraction_m2048_up_to_60_sms"]["smkern"]
    assert (row["value"], row["met"], row["cells"], row["below_target"]) == (0.8, False, 2, 1)
    assert row["worst"][0]["num_sms"] == 16


def test_streaming_rows_split_by_budget_and_rows():
    shape = (28672, 4096)
    cells = [
        cell(m=8, shape=shape, num_sms=16, fraction_of_bandwidth=0.76),
        cell(m=8, shape=shape, num_sms=24, fraction_of_bandwidth=0.74),
        cell(m=8, shape=shape, num_sms=32, fraction_of_bandwidth=0.88),
        cell(m=64, shape=shape, num_sms=32, fraction_of_ceiling=0.79),
        cell(m=8, num_sms=32, fraction_of_bandwidth=0.1),
    ]
    summary = summarize(cells)
    assert summary["streaming_m32"]["value"] == 0.88
    assert summary["streaming_m32_at_16_and_24"]["value"] == 0.74
    assert summary["streaming_m32_at_16_and_24"]["met"] is False
    assert summary["streaming_m64"]["met"] is True


def test_full_chip_row_takes_full_cells_only():
    cells = [cell(vs_cublas=0.95, num_sms=132), cell(vs_cublas=0.5)]
    row = summarize(cells)["vs_cublas_full_m2048"]["smkern"]
    assert (row["value"], row["met"], row["cells"]) == (0.95, True, 1)


def test_model_and_wrong_budget_are_paired_by_group():
    cells = [
        cell("smkern:triton", us=100.0, source="table"),
        cell("smkern:model", us=106.0),
        cell("smkern:model", us=500.0, m=64),
        cell("smkern", us=100.0),
        cell("wrong-budget", us=150.0),
    ]
    summary = summarize(cells)
    assert summary["model_over_tuned"]["value"] == pytest.approx(1.06)
    assert summary["model_over_tuned"]["met"] is True
    assert summary["model_over_tuned"]["tuned_cells"] == 1
    assert summary["wrong_budget_over_smkern"] == {"value": 1.5, "worst": 1.5, "cells": 1}


def test_cells_that_failed_are_named_and_counted_nowhere_else():
    broken = cell("smkern:triton", us=None, error="wrong result", vs_cublas=None)
    peer = cell("cublas", us=None, error="clusters")
    summary = summarize([broken, peer])
    assert [c["error"] for c in summary["not_measured"]] == ["wrong result"]
    assert summary["geomean_vs_cublas"]["smkern:triton"]["met"] is None


def test_cublaslt_cells_are_named():
    row = summarize([cell(config="cublaslt"), cell(m=1)])["cublaslt_dispatched"]
    assert (row["cells"], row["of"]) == (1, 2)


def test_a_summary_is_json_and_other_suites_have_none():
    json.dumps(summarize([cell()]), allow_nan=False)
    assert summarize([{"op": "read", "provider": "smkern"}]) == {}
