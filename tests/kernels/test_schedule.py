"""Every K step of every tile is worked through once, and partials find each other."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError
from smkern.kernels import gemm_tiles as device
from smkern.kernels import make_schedule
from smkern.tuning.config import STREAM_K, Budget, GemmConfig, GemmProblem


def segments(schedule, pid):
    numbers = (schedule.whole_tiles, schedule.stream_iters, schedule.quantum, schedule.k_iters)
    streamed, total = device._num_segments(pid, schedule.num_ctas, *numbers)
    return [device._segment(i, streamed, pid, schedule.num_ctas, *numbers) for i in range(total)]


problems = st.builds(  # 250 x 64 tiles at most: a split of all has a counter for each
    GemmProblem, m=st.integers(1, 4000), n=st.integers(1, 4096), k=st.integers(1, 5000)
)
configs = st.builds(
    GemmConfig,
    kernel=st.just("ws"),
    block_m=st.sampled_from([16, 64, 128, 192, 256]),
    block_n=st.sampled_from([64, 128, 192, 256]),
    block_k=st.sampled_from([64, 128]),
    swap=st.booleans(),
    ctas_per_sm=st.sampled_from([1, 2]),
    split=st.sampled_from([STREAM_K, 1, 2, 3, 4]),
    max_ctas=st.sampled_from([0, 7, 64]),
)
budgets = st.builds(Budget, num_sms=st.integers(1, 132), confined=st.sampled_from(["mask", "grid"]))
turns = st.sampled_from([1, 4])


@given(problems, configs, budgets, turns)
def test_every_k_step_is_done_once(problem, config, budget, turns):
    schedule = make_schedule(problem, config, budget, turns)
    tiles = schedule.tiles_x * schedule.tiles_y
    done = Counter()
    for pid in range(schedule.num_ctas):
        for tile, begin, end in segments(schedule, pid):
            assert 0 <= tile < tiles
            assert 0 <= begin < end <= schedule.k_iters
            assert begin % turns == 0 or schedule.k_iters % turns
            done.update((tile, k) for k in range(begin, end))
    assert len(done) == tiles * schedule.k_iters
    assert set(done.values()) == {1}


@given(problems, configs, budgets, turns)
def test_partials_have_slots_of_their_own_and_contributors_agree(problem, config, budget, turns):
    schedule = make_schedule(problem, config, budget, turns)
    slots, pieces = set(), Counter()
    for pid in range(schedule.num_ctas):
        for tile, begin, end in segments(schedule, pid):
            if end - begin == schedule.k_iters:
                continue
            nth = tile - schedule.whole_tiles
            slot = device._partial_slot(pid, nth, schedule.quantum, schedule.k_iters)
            assert 0 <= slot < schedule.partial_slots
            assert slot not in slots
            slots.add(slot)
            first, count = device._contributors(nth, schedule.quantum, schedule.k_iters)
            assert first <= pid < first + count
            pieces[tile] += 1
    for tile, seen in pieces.items():
        nth = tile - schedule.whole_tiles
        assert device._contributors(nth, schedule.quantum, schedule.k_iters)[1] == seen


@given(problems, configs, budgets, turns)
def test_the_grid_stays_within_the_budget(problem, config, budget, turns):
    schedule = make_schedule(problem, config, budget, turns)
    resident = config.ctas_per_sm if budget.confined == "mask" else 1
    assert 1 <= schedule.num_ctas <= budget.num_sms * resident
    if config.max_ctas:
        assert schedule.num_ctas <= config.max_ctas
    assert all(segments(schedule, pid) for pid in range(schedule.num_ctas - 1))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_raster_visits_every_tile_once(tiles_m, tiles_n, group):
    seen = {
        device._tile_coords(t, tiles_m, tiles_n, min(group, tiles_m))
        for t in range(tiles_m * tiles_n)
    }
    assert seen == {(i, j) for i in range(tiles_m) for j in range(tiles_n)}


def test_too_many_streamed_tiles_are_refused_with_the_limit():
    config = GemmConfig("ws", 16, 64, 64, swap=True, split=2)
    with pytest.raises(ArgumentError, match=r"16384"):
        make_schedule(GemmProblem(16 * 200, 64 * 200, 64), config, Budget(132, "mask"))


@given(st.integers(1, 4000), st.sampled_from([16, 48, 64, 80, 128, 160, 256]))
def test_row_tiles_read_what_is_there_and_store_each_row_once(m, block):
    stored = []
    for tile in range(-(-m // block)):
        first, own = device._first_row(tile, block, m), tile * block
        assert first <= own
        assert m < block or first + block <= m, "no row outside the matrix is read"
        stored += [row for row in range(first, min(first + block, m)) if row >= own]
    assert stored == list(range(m))
