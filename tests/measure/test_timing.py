from __future__ import annotations

import pytest

from smkern.measure.timing import (
    Case,
    Timing,
    calls_for,
    measure,
    ratio,
    rounds_for,
    time_interleaved,
    try_eagerly,
)


def test_medians_per_call_of_interleaved_graphs(cuda):
    cases = {
        "fast": Case(lambda i: cuda.work_us(10), cuda.new_stream(), calls=8),
        "slow": Case(lambda i: cuda.work_us(40), cuda.new_stream(), calls=2),
    }
    busy = []
    timings = time_interleaved(cases, rounds=5, while_busy=lambda: busy.append(1))
    assert timings["fast"].us_median == pytest.approx(10)
    assert timings["slow"].us_median == pytest.approx(40)
    assert len(timings["fast"].us_all) == 5
    assert busy == [1]
    assert cuda.log.count("replay") == 2 * 6
    assert cuda.log[-2:] == ["reset", "reset"]


def test_a_graph_rotates_buffer_sets_from_its_first(cuda):
    seen = []
    time_interleaved({"x": Case(seen.append, cuda.new_stream(), calls=3, first_set=2)}, rounds=1)
    assert seen == [2, 3, 4]


def test_a_case_that_fails_in_capture_is_left_out_or_raised(cuda):
    def broken(i):
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED\nmore")

    cases = {
        "good": Case(lambda i: cuda.work_us(5), cuda.new_stream()),
        "bad": Case(broken, cuda.new_stream()),
    }
    errors: dict[str, str] = {}
    assert set(time_interleaved(cases, rounds=1, errors=errors)) == {"good"}
    assert errors == {"bad": "RuntimeError: CUBLAS_STATUS_EXECUTION_FAILED"}
    assert cuda.capturing is None
    with pytest.raises(RuntimeError, match="EXECUTION_FAILED"):
        time_interleaved(cases, rounds=1)
    assert cuda.capturing is None
    assert time_interleaved({"bad": cases["bad"]}, rounds=1, errors=errors) == {}


def test_measure_runs_eagerly_before_it_captures(cuda):
    modes = []

    def call(i):
        modes.append(cuda.capturing is not None)
        cuda.work_us(7)

    timings = measure({"only": call}, cuda.new_stream(), iters=4, rounds=3)
    assert modes == [False, True, True, True, True]
    assert timings["only"].us_median == pytest.approx(7)


def test_measure_names_what_failed(cuda):
    def broken(i):
        raise ValueError("no such tile")

    errors: dict[str, str] = {}
    good = {"broken": broken, "good": lambda i: cuda.work_us(3)}
    assert set(measure(good, cuda.new_stream(), errors=errors)) == {"good"}
    assert errors == {"broken": "ValueError: no such tile"}
    with pytest.raises(ValueError, match="no such tile"):
        measure({"broken": broken}, cuda.new_stream())


def test_try_eagerly_tells_success_from_failure(cuda):
    assert try_eagerly(lambda i: cuda.work_us(1), cuda.new_stream()) is None


def test_statistics():
    assert ratio(Timing((2.0, 4.0, 9.0)), Timing((1.0, 2.0, 3.0))) == 2.0
    assert ratio(Timing((4.0,)), Timing((1.0, 2.0, 3.0))) == 2.0
    assert Timing((3.0,)).noise == 0.0
    assert Timing((9.0, 10.0, 11.0, 10.0, 10.0)).noise == pytest.approx(0.0)
    assert Timing((9.0, 10.0, 11.0)).noise == pytest.approx(0.05)


def test_calls_and_rounds_stay_in_bounds():
    assert calls_for(5, target_us=250) == 48
    assert calls_for(100, target_us=250) == 3
    assert calls_for(10_000) == 1
    assert rounds_for(1000, budget_us=8000) == 9
    assert rounds_for(100_000, budget_us=8000) == 3
    assert rounds_for(1500, budget_us=6000) == 5
