"""Samples as cells of a table."""

from __future__ import annotations

import pytest

from smkern.latency import Chunk, Sample, Size
from smkern.latency.profile_table import timing_of, timings_of
from smkern.latency.table import Timing

STEP = Size(num_layers=4, batch=8, total_kv=800)
PROMPTS = Size((Chunk(64, 32),) * 2, 4, 4, True)
UNLIKE = {
    "chunks": Sample(Size((Chunk(5), Chunk(6)), 4, 4, True), 100, 1.0),
    "rows": Sample(Size(num_layers=4, batch=8, total_kv=801), 24, 1.0),
    "the neighbour": Sample(STEP, 24, 1.0, Size((Chunk(5), Chunk(5, 1)), 4, 4), 108),
}


def test_a_pair_is_two_cells() -> None:
    samples = [Sample(STEP, 24, 9.0, PROMPTS, 108), Sample(PROMPTS, 108, 7.0, STEP, 24)]
    step = Timing("decode", 24, 8, 100, beside_sms=108, beside_tokens=64, beside_cached=32)
    prompts = Timing(
        "prefill", 108, prompts=2, tokens=64, cached=32, beside_sms=24, beside_batch=8,
        beside_context=100,
    )  # fmt: skip
    assert timings_of(samples) == {step: 9.0, prompts: 7.0}


def test_some_layers() -> None:
    part = Size((Chunk(64),), 3, 4)
    timing = timing_of(Sample(part, 108, 7.0))
    assert timing == Timing("prefill", 108, prompts=1, tokens=64, layers=3)
    assert timing.size(4) == part


@pytest.mark.parametrize("what", UNLIKE)
def test_requests_that_are_unlike_are_left_out(what: str) -> None:
    assert timings_of([UNLIKE[what]]) == {}
