from __future__ import annotations

import pytest

from smkern.measure.timing import (
    Case,
    Timing,
    calls_for,
    first_line,
    ratio,
    rounds_for,
    time_interleaved,
    time_within,
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


def test_an_eager_run_tells_success_from_the_error_s_first_line(cuda):
    seen = []
    assert try_eagerly(seen.append, cuda.new_stream()) is None
    assert seen == [0]

    def broken(i):
        raise ValueError("no such tile\nmore")

    assert try_eagerly(broken, cuda.new_stream()) == "ValueError: no such tile"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("in /home/me/.cache/x-1/decode.cu:63: no group", "in decode.cu:63: no group"),
        ("2 tokens/ms, 3/4 of a wave", "2 tokens/ms, 3/4 of a wave"),
    ],
)
def test_an_error_names_files_without_their_folders(text, shown):
    assert first_line(ValueError(text)) == f"ValueError: {shown}"


def test_a_budget_of_time_sizes_graphs_and_rounds_and_names_who_cannot_be_captured(cuda):
    def broken(i):
        raise ValueError("no such tile")

    stream, errors, busy = cuda.new_stream(), {}, []
    cases = {"good": Case(lambda i: cuda.work_us(50), stream), "bad": Case(broken, stream)}
    found = time_within(1000.0, cases, while_busy=lambda: busy.append(1), errors=errors)
    assert set(found) == {"good"}
    assert found["good"].us_median == pytest.approx(50)
    assert len(found["good"].us_all) == rounds_for(250, budget_us=1000.0) == 5
    assert errors == {"bad": "ValueError: no such tile"}
    assert busy == [1]
    assert time_within(1.0, {}, while_busy=lambda: None, errors=errors) == {}


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
