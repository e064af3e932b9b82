from __future__ import annotations

import click
import pytest

from smkern.bench.cases import gemm_groups
from smkern.measure.gemm import BUDGETS, MS, SHAPES
from smkern.measure.options import IntList, ShapeList
from smkern.measure.partitions import side_for


def test_the_suite_is_every_shape_row_and_budget_once():
    groups = gemm_groups()
    assert len(groups) == len(set(groups)) == len(SHAPES) * len(MS) * len(BUDGETS) == 810
    assert groups == sorted(groups, key=lambda g: SHAPES.index((g.n, g.k)))


def test_streaming_adds_24_sms_for_decode_rows_of_the_widest_weight():
    extra = set(gemm_groups(streaming=True)) - set(gemm_groups())
    assert {(g.n, g.k, g.num_sms) for g in extra} == {(28672, 4096, 24)}
    assert {g.m for g in extra} == {1, 8, 16, 32, 64}


def test_integers_and_ranges():
    read = IntList()
    assert read.convert("16,32", None, None) == (16, 32)
    assert read.convert("16-22:2,60", None, None) == (16, 18, 20, 22, 60)
    assert read.convert((1, 2), None, None) == (1, 2)


@pytest.mark.parametrize("text", ["", "a", "0", "16,-2", "4-2"])
def test_bad_integers_are_refused(text):
    with pytest.raises(click.BadParameter):
        IntList().convert(text, None, None)


def test_shapes():
    assert ShapeList().convert("6144x4096,8X16", None, None) == ((6144, 4096), (8, 16))
    for text in ("6144", "6144x", "0x4", "1x2x3"):
        with pytest.raises(click.BadParameter):
            ShapeList().convert(text, None, None)


@pytest.mark.parametrize(
    ("num_sms", "spread", "default"),
    [
        (16, (16, "decode"), (16, "decode")),
        (60, (60, "decode"), (72, "prefill")),
        (66, (66, "decode"), None),
        (72, (60, "prefill"), (72, "decode")),
        (84, (48, "prefill"), (48, "prefill")),
        (100, (32, "prefill"), (32, "prefill")),
        (116, (16, "prefill"), (16, "prefill")),
        (118, (14, "prefill"), None),
        (17, None, None),
        (132, None, None),
        (0, None, None),
    ],
)
def test_which_side_of_which_split_holds_a_budget(num_sms, spread, default):
    assert side_for(num_sms, 132, "spread") == spread
    assert side_for(num_sms, 132, "default") == default
