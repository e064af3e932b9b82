"""The suite of what nobody tuned: its cases, that they are unseen, and its rows."""

from __future__ import annotations

import json

import pytest

from smkern.bench import untuned
from smkern.bench.tables.gemm import untuned_table
from smkern.bench.untuned import (
    check_unseen,
    constants_without,
    fitted_shapes,
    shapes,
    untuned_groups,
)
from smkern.errors import TableError
from smkern.measure.gemm import SHAPES
from smkern.profile import load_profile
from smkern.tuning.cost_constants import NAMES, CostConstants
from smkern.tuning.select import GEMM_FAMILY

GPU = "NVIDIA H200"


def test_cases_are_the_same_on_every_run_and_in_drawn_budgets():
    groups = untuned_groups(132)
    assert groups == untuned_groups(132)
    assert len(groups) >= 600
    assert {group.num_sms for group in groups} <= set(range(16, 131, 2))
    assert {group.case.shape for group in groups} == set(shapes())
    heads = {model["head"] for model in untuned.MODELS.values()}
    assert max(g.case.m for g in groups if g.case.shape in heads) == untuned.HEAD_ROWS


def test_no_shape_is_in_a_shipped_table_or_in_the_fit():
    assert len(fitted_shapes(GPU)) >= 30
    assert not set(shapes()) & fitted_shapes(GPU)
    assert not set(shapes()) & {
        (key.n, key.k) for key in GEMM_FAMILY.load(load_profile("h200")).cells
    }
    assert set(SHAPES) <= fitted_shapes(GPU)
    assert not fitted_shapes("NVIDIA nothing")


def test_a_shape_that_was_seen_is_named():
    with pytest.raises(TableError, match="this table has 1536x4096"):
        check_unseen(shapes(), [(1536, 4096), (64, 64)], "this table")


def cell(ratio, again=None, m=64, provider="smkern:model", us=10.0, source="model"):
    found = {
        "op": "gemm", "provider": provider, "num_sms": 32, "group_sms": 32, "config": "x",
        "case": {"m": m, "n": 64, "k": 64}, "vs_cublas": ratio, "us": us, "source": source,
    }  # fmt: skip
    return found | ({} if again is None else {"vs_cublas_again": again})


def test_a_cell_loses_where_both_measurements_say_so():
    cells = [cell(1.2), cell(0.8, 1.0, m=1), cell(0.85, 0.8, m=2), cell(None, m=3)]
    rows = untuned.summarize(cells)
    assert rows["untuned_worst"]["value"] == 0.85
    assert rows["untuned_worst"]["cells_under"] == 1
    assert rows["untuned_share_under_0.97"]["value"] == round(1 / 3, 4)
    assert rows["untuned_geomean"]["cells"] == 3
    assert not rows["untuned_worst"]["met"]


def test_what_dispatch_takes_has_rows_and_columns_of_its_own():
    sizes = [1, 3]
    model = [cell(1.2, m=m) for m in sizes]
    dispatched = [cell(1.5, m=m, provider="smkern") for m in sizes]
    rows = untuned.summarize([*model, *dispatched])
    assert rows["untuned_geomean"]["value"] == 1.2
    assert rows["untuned_dispatched_geomean"]["value"] == 1.5
    assert [each["vs_cublas"] for each in rows["worst_cells"]] == [1.2, 1.2]

    everywhere = [cell(1.2, m=m) for m in untuned.ROWS]
    assert "as dispatched" not in untuned_table(everywhere)
    both = [*everywhere, *(cell(1.5, m=m, provider="smkern") for m in untuned.ROWS)]
    assert "| all | 1.200 | 1.20 | 0 | 0 | 1.500 | 1.50 | 0 | 0 | 12 |" in untuned_table(both)


def test_left_out_shapes_are_judged_against_tuned_cells_alone():
    cells = [
        cell(1, provider="smkern:triton", us=10.0, source="table"),
        cell(1, us=10.5),
        cell(1, provider="smkern:triton", m=1, source="model"),
        cell(1, m=1, us=100.0),
    ]
    rows = untuned.summarize_left_out(cells)
    assert rows["left_out_geomean"] == {"value": 1.05, "target": 1.04, "met": False, "cells": 1}
    assert rows["left_out_worst"]["met"]


def test_constants_of_a_left_out_shape(tmp_path):
    with pytest.raises(TableError, match="fitted without 64x32"):
        constants_without((64, 32), tmp_path)
    text = {"constants": dict.fromkeys(NAMES, 1.0), "variants": {}}
    (tmp_path / "64x32.json").write_text(json.dumps(text))
    made = constants_without((64, 32), tmp_path)
    assert made == CostConstants(**dict.fromkeys(NAMES, 1.0))
