"""Lines between points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.latency.curve import Curve, Filled

LINE = Curve.of([((4.0,), 10.0), ((1.0,), 2.0), ((16.0,), 10.0)])


@pytest.mark.parametrize(
    ("x", "value"), [(0.5, 2.0), (1, 2.0), (2, 6.0), (4, 10.0), (16, 10.0), (1000, 10.0)]
)
def test_linear_in_the_logarithm_and_level_beyond(x: float, value: float) -> None:
    assert LINE.at(x) == pytest.approx(value)


def test_points_need_not_form_a_grid() -> None:
    curve = Curve.of([((1, 1), 1.0), ((1, 4), 3.0), ((4, 2), 7.0)])
    assert curve.at(1, 2) == pytest.approx(2.0)
    assert curve.at(4, 100) == pytest.approx(7.0)
    assert curve.at(2, 2) == pytest.approx((2.0 + 7.0) / 2)


def test_without_points_it_is_false() -> None:
    assert not Curve.of([])
    assert LINE


coordinates = st.integers(1, 64).map(float)
points = st.dictionaries(
    st.tuples(coordinates, coordinates, coordinates), st.floats(0.5, 2.0), min_size=1, max_size=12
)


@given(points, coordinates, coordinates, coordinates)
def test_a_slice_is_the_curve_at_one_coordinate(cells, x, y, z) -> None:
    curve = Curve.of(cells.items())
    wanted = pytest.approx(curve.at(x, y, z))
    assert curve.slice(x).at(y, z) == wanted
    assert curve.slice(x).slice(y).at(z) == wanted


def test_a_place_with_few_points_follows_its_neighbours() -> None:
    """On 2 the shape between 1 and 4, times what its only point is over that."""
    shape = {(n, x): n * x for n in (1.0, 4.0) for x in (1.0, 4.0, 16.0)}
    filled = Filled([*shape.items(), ((2.0, 4.0), 12.0)])
    assert all(filled.at(*at) == pytest.approx(value) for at, value in shape.items())
    assert filled.at(2, 4) == pytest.approx(12.0)
    assert filled.at(2, 16) / filled.at(2, 4) == pytest.approx((16 + 64) / (4 + 16))
    assert not Filled([])
