from __future__ import annotations

import click
import pytest

from smkern.measure.options import IntList, ShapeList


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
