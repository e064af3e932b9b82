"""MuxWise's guard: the worst slowdown of a cell, its neighbours' where it has none, refined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import LatencyError
from smkern.latency import Chunk, Size
from smkern.latency.guard import Cell, ContentionGuard
from smkern.latency.muxwise import MuxWise
from smkern.latency.sample import Sample
from tests.latency.test_drift import PROMPTS, SAMPLES, prompts, step, truth

STEP = step(16, 16 * 100)
PROMPT = prompts((4096, 0))


def beside(slowdown: float, *, size: Size = STEP, prompt: Size = PROMPT, sms: int = 50) -> Sample:
    return Sample(size, sms, slowdown * truth(size, sms), prompt, 32)


def observe(model: MuxWise, sample: Sample) -> bool:
    return model.observe(sample.size, sample.num_sms, sample.us, sample.beside, sample.beside_sms)


@pytest.mark.parametrize(
    ("tokens", "level"),
    [(1, 0), (2048, 0), (8191, 0), (8192, 1), (32_767, 1), (32_768, 2), (131_072, 3), (10**6, 3)],
)
def test_cells_of_tokens_are_powers_of_four(tokens: int, level: int) -> None:
    cell = Cell.of(step(1, tokens), 50, prompts((tokens, tokens)))
    assert (cell.new, cell.cached, cell.context) == (level, level, level)


@pytest.mark.parametrize(("batch", "level"), [(1, 0), (2, 1), (3, 2), (4, 2), (64, 6), (65, 7)])
def test_cells_of_rows_are_powers_of_two(batch: int, level: int) -> None:
    assert Cell.of(step(batch, batch), 50, PROMPT).batch == level


@pytest.mark.parametrize(("sms", "level"), [(8, 1), (23, 1), (24, 2), (32, 2), (112, 7)])
def test_cells_of_partitions_are_by_sixteen(sms: int, level: int) -> None:
    assert Cell.of(STEP, sms, PROMPT).sms == level


def test_cells_of_prompts_are_by_all_their_tokens() -> None:
    cell = Cell.of(STEP, 50, prompts((5000, 100), (5000, 9000)))
    assert (cell.new, cell.cached) == (1, 1)


def test_the_largest_slowdown_of_the_cell_holds() -> None:
    model = MuxWise([*SAMPLES, beside(1.1), beside(1.3), beside(1.2)])
    assert model.slowdown(STEP, 50, PROMPT, 50) == pytest.approx(1.3)
    assert model.worst_us(STEP, 50, PROMPT, 50) == pytest.approx(1.3 * truth(STEP, 50))
    assert model.alone_us(STEP, 50) == pytest.approx(truth(STEP, 50))


def test_a_cell_that_was_not_measured_takes_its_nearest_neighbours_largest() -> None:
    long, longest = prompts((16_384, 0)), prompts((200_000, 0))
    model = MuxWise([*SAMPLES, beside(1.1), beside(1.25, prompt=longest), beside(1.9, sms=100)])
    # one cell from the first, two from the second, three and more from the last
    assert model.slowdown(STEP, 50, long, 50) == pytest.approx(1.1)
    assert model.slowdown(STEP, 50, prompts((50_000, 0)), 50) == pytest.approx(1.25)


def test_of_neighbours_as_near_the_worse_one_counts() -> None:
    guard = ContentionGuard()
    guard.raise_to(Cell(0, 0, 4, 0, 3), 1.4)
    guard.raise_to(Cell(2, 0, 4, 0, 3), 1.2)
    guard.raise_to(Cell(1, 0, 4, 0, 5), 9.0)
    assert guard.at(Cell(1, 0, 4, 0, 3)) == 1.4
    # a cell that was measured lies beside worse ones, too
    assert guard.at(Cell(2, 0, 4, 0, 3)) == 1.2
    assert guard.at(Cell(2, 0, 4, 0, 4)) == 9.0
    assert guard.at(Cell(0, 0, 4, 0, 3)) == 1.4
    assert len(guard) == 3


def test_observations_raise_the_guard_and_never_lower_it() -> None:
    model = MuxWise([*SAMPLES, beside(1.1)])
    far = prompts((60_000, 60_000))
    assert model.slowdown(STEP, 50, far, 50) == pytest.approx(1.1)
    assert observe(model, beside(1.5))
    assert not observe(model, beside(1.2))
    assert model.slowdown(STEP, 50, PROMPT, 50) == pytest.approx(1.5)
    # what was looked up before has grown with it
    assert model.slowdown(STEP, 50, far, 50) == pytest.approx(1.5)


@pytest.mark.parametrize(
    "sample",
    [
        Sample(STEP, 50, 1e6),
        Sample(STEP, 50, 1e6, None, 50),
        Sample(STEP, 50, 1e6, STEP, 50),
        Sample(PROMPT, 50, 1e9, STEP, 50),
    ],
    ids=["alone", "unknown", "decode", "prefill"],
)
def test_other_launches_say_nothing_about_decode_beside_prompts(sample: Sample) -> None:
    model = MuxWise([*SAMPLES, beside(1.1)])
    assert not observe(model, sample)
    assert model.slowdown(STEP, 50, PROMPT, 50) == pytest.approx(1.1)


def test_only_decode_beside_prompts_is_slowed() -> None:
    model = MuxWise([*SAMPLES, beside(1.5)])
    assert model.slowdown(PROMPT, 50, STEP, 50) == 1.0
    assert model.slowdown(STEP, 50, STEP, 50) == 1.0
    assert model.slowdown(Size((Chunk(8),), 4, 4, True, 2, 20), 50, PROMPT, 50) == 1.0


def test_a_step_that_was_faster_than_predicted_is_no_speedup() -> None:
    assert MuxWise([*SAMPLES, beside(0.8)]).slowdown(STEP, 50, PROMPT, 50) == 1.0


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 300_000), st.floats(1.0, 1.4))))
def test_no_measured_pair_exceeds_its_guard(pairs: list[tuple[int, int, float]]) -> None:
    samples = [beside(1.0)] + [
        beside(slowdown, size=step(batch, 500 * batch), prompt=prompts((tokens, 0)))
        for batch, tokens, slowdown in pairs
    ]
    model = MuxWise(SAMPLES + samples)
    for sample in samples:
        assert sample.beside is not None
        assert model.worst_us(sample.size, 50, sample.beside, 50) >= sample.us * (1 - 1e-9)


def test_without_pairs_the_guard_is_missing() -> None:
    with pytest.raises(LatencyError, match="beside prompts on 50 to 100 SMs among 16 samples"):
        MuxWise(SAMPLES)


def test_pairs_on_a_partition_without_a_solo_run_are_left_out() -> None:
    outside = Sample(STEP, 20, 1e9, PROMPT, 80)
    model = MuxWise([*SAMPLES, beside(1.1), outside])
    assert model.slowdown(STEP, 50, PROMPT, 50) == pytest.approx(1.1)
    with pytest.raises(LatencyError, match="guard knows no slowdown"):
        MuxWise([*SAMPLES, outside])


@pytest.mark.parametrize(("size", "sms"), [(Size(), 50), (STEP, 20)], ids=["nothing", "outside"])
def test_what_the_solo_run_does_not_know_is_no_observation(size: Size, sms: int) -> None:
    model = MuxWise([*SAMPLES, beside(1.1)])
    assert not model.observe(size, sms, 1e9, PROMPT, 80)
    assert model.slowdown(STEP, 50, PROMPT, 50) == pytest.approx(1.1)


def test_without_a_solo_run_there_is_no_model() -> None:
    with pytest.raises(LatencyError, match="decode: none was measured"):
        MuxWise([*(s for s in SAMPLES if s.size in PROMPTS), beside(1.1)])
