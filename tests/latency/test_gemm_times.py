"""Times of GEMMs: the stair, what is between counts of SMs, what is no table."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.latency.gemm_times import ROWS, GemmTimes
from smkern.latency.roofline import Roofline
from tests.latency.small import PROFILE, SIZES

TIMES = GemmTimes.of([16, 8], lambda rows, num_sms: (rows * 80.0 / num_sms, rows / 10))


@pytest.mark.parametrize(
    ("rows", "next_step"), [(1, 1), (3, 4), (9, 16), (65, 80), (257, 320), (1025, 1152)]
)
def test_rows_take_as_long_as_the_next_step(rows: int, next_step: int) -> None:
    assert TIMES.us(rows, 0, 1, 8) == 10.0 * next_step


def test_a_line_above_the_stair_and_beyond() -> None:
    assert TIMES.us(2400, 0, 1, 8) == pytest.approx(24_000.0)
    assert TIMES.us(3 * ROWS[-1], 0, 1, 8) == pytest.approx(30.0 * ROWS[-1])


def test_layers_and_head_add_up() -> None:
    assert TIMES.us(64, 0, 3, 8) == 3 * 640.0
    assert TIMES.us(64, 32, 3, 8) == 3 * 640.0 + 3.2


def test_prompts_end_with_their_last_rows() -> None:
    """Behind attention the last layer computes as many rows as the head, or none."""
    roofline = Roofline(SIZES, PROFILE, gemms=TIMES)
    qkv, behind = 1536 / 14_848, 13_312 / 14_848
    assert roofline.others_us(64, 0, 3, 8, True) == pytest.approx((2 + qkv) * 640.0)
    drawn = roofline.others_us(64, 2, 3, 8, True)
    assert drawn == pytest.approx((2 + qkv) * 640.0 + behind * 20.0 + 0.2)
    assert roofline.others_us(64, 2, 3, 8) == 3 * 640.0 + 0.2


@pytest.mark.parametrize(("num_sms", "like"), [(8, 8), (15, 8), (16, 16), (99, 16), (2, 8)])
def test_more_sms_are_as_fast_as_the_last_count(num_sms: int, like: int) -> None:
    assert TIMES.us(64, 0, 1, num_sms) == 64 * 80.0 / like


def test_no_rows_take_longer_than_more_rows() -> None:
    """What cells and the model say of single rows may fall: those could be padded."""

    def us(rows: int, num_sms: int) -> tuple[float, float]:
        return (200.0, 30.0) if rows == 128 else (1.0 * rows, rows / 10)

    times = GemmTimes.of([8], us)
    assert [times.us(rows, 0, 1, 8) for rows in (112, 128, 144, 160)] == [112, 144, 144, 160]
    assert times.us(0, 128, 0, 8) == pytest.approx(14.4)
    old = TIMES.to_json()
    old["layer_us"][0][1] = old["layer_us"][0][2] + 1  # of a file from before
    found = GemmTimes.from_json(old)
    assert found.layer_us[0][1] == found.layer_us[0][2] == TIMES.layer_us[0][2]


def test_it_comes_back() -> None:
    assert GemmTimes.from_json(TIMES.to_json()) == TIMES


@pytest.mark.parametrize(
    "change",
    [
        {"sms": [8]},
        {"layer_us": [[1.0], [2.0]]},
        {"sms": [], "layer_us": [], "head_us": []},
        {"head_us": [[1.0], []]},
    ],
)
def test_what_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="GEMM times"):
        GemmTimes.from_json(TIMES.to_json() | change)
