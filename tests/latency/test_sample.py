"""Measured launches as records that models are fitted to."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.latency.sample import Sample, samples_of
from smkern.latency.table import Timing

STEP = Size(layers=4, num_layers=4, batch=2, total_kv=20)
PROMPT = Size((Chunk(8),), 4, 4, True)


def test_a_cell_becomes_a_sample() -> None:
    cells = {
        Timing("decode", 20, batch=2, context=10): 5.0,
        Timing("prefill", 80, prompts=1, tokens=8, beside_sms=20, beside_batch=2): 7.0,
    }
    first, second = samples_of(cells, 4)
    assert first == Sample(STEP, 20, 5.0)
    assert (second.size, second.num_sms, second.us, second.beside_sms) == (PROMPT, 80, 7.0, 20)
    assert second.beside is not None
    assert second.beside.batch == 2


@pytest.mark.parametrize(
    ("size", "kind"),
    [(STEP, "decode"), (PROMPT, "prefill"), (Size((Chunk(8),), 4, 4, True, 2, 20), "mixed")],
    ids=["decode", "prefill", "mixed"],
)
def test_the_kind_follows_from_the_launch(size: Size, kind: str) -> None:
    assert Sample(size, 1, 1.0).kind == kind


def test_a_neighbour_that_nobody_wrote_down_is_one() -> None:
    assert Sample(STEP, 20, 1.0).alone
    assert not Sample(STEP, 20, 1.0, None, 80).alone


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": Size()}, "empty launch"),
        ({"us": 0.0}, "0.0 us"),
        ({"us": float("nan")}, "nan us"),
        ({"num_sms": 0}, "0 SMs"),
        ({"beside_sms": -1}, "beside -1"),
        ({"beside": PROMPT}, "give beside_sms"),
        ({"size": Size((Chunk(0, 8),), 36, 36)}, "prompt with 0 new tokens"),
        ({"beside": Size((Chunk(0),), 36, 36), "beside_sms": 9}, "prompt with 0 new tokens"),
        ({"size": Size((Chunk(5),), 0, 0)}, "model of 0 layers"),
        ({"size": Size((Chunk(5),), 0, 36)}, "0 layers of prompts: give 1 to 36"),
        ({"size": Size((Chunk(5),), 37, 36)}, "37 layers of prompts: give 1 to 36"),
        ({"size": Size(batch=4)}, "4 decode rows with 0 keys"),
    ],
    ids=[
        "empty", "no time", "nan", "no sms", "negative", "no place", "no tokens",
        "no tokens beside", "no model", "no layer", "too many layers", "no keys",
    ],
)  # fmt: skip
def test_nonsense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Sample(**{"size": STEP, "num_sms": 20, "us": 1.0} | values)
