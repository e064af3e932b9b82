"""Coefficients from measured values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import LatencyError
from smkern.latency.least_squares import fit, fit_any_sign

COEFFICIENT = st.floats(0.01, 100.0)
ROWS = [(n * n, n, 1.0) for n in (1.0, 2.0, 5.0, 9.0, 14.0)]
NAMES = ("n^2", "n", "1")


def fitted(rows: list[tuple[float, ...]], values: list[float]) -> tuple[float, ...]:
    return fit(rows, values, NAMES[-len(rows[0]) :], what="prompts", remedy="measure more")


def values_of(rows: list[tuple[float, ...]], coefficients: tuple[float, ...]) -> list[float]:
    return [sum(x * c for x, c in zip(row, coefficients, strict=True)) for row in rows]


@given(st.tuples(COEFFICIENT, COEFFICIENT, COEFFICIENT))
def test_known_coefficients_come_back(known: tuple[float, ...]) -> None:
    assert fitted(ROWS, values_of(ROWS, known)) == pytest.approx(known, rel=1e-4, abs=1e-6)


@given(st.tuples(*[st.floats(-100.0, 100.0)] * 3))
def test_coefficients_of_any_sign_come_back(known: tuple[float, ...]) -> None:
    got = fit_any_sign(ROWS, values_of(ROWS, known))
    assert got == pytest.approx(known, rel=1e-4, abs=1e-4)


def test_errors_are_relative() -> None:
    # one coefficient c for 1 -> 1 and 1 -> 3: (c - 1)^2 + (c/3 - 1)^2 is least at c = 12/10
    assert fitted([(1.0,), (1.0,)], [1.0, 3.0]) == pytest.approx((1.2,))


def test_no_coefficient_is_negative() -> None:
    # 3, 2, 1.5 at n = 1, 2, 3: the line falls, so that only the constant is left
    slope, constant = fitted([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], [3.0, 2.0, 1.5])
    assert slope == 0.0
    # sum (c/v - 1)^2 is least at sum(1/v) / sum(1/v^2) = 1.5 / (1/9 + 1/4 + 4/9)
    assert constant == pytest.approx(1.5 / (29 / 36))


def test_a_term_that_follows_from_others_gets_nothing_of_any_sign() -> None:
    assert fit_any_sign([(1.0, 2.0), (3.0, 6.0)], [5.0, 15.0]) == pytest.approx((5.0, 0.0))
    assert fit_any_sign([(0.0, 1.0), (0.0, 2.0)], [5.0, 10.0]) == pytest.approx((0.0, 5.0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:2], "prompts: 2 measured for 3 coefficients .n^2, n, 1.; measure more"),
        ([(0.0, n, 1.0) for n in (1.0, 2.0, 3.0)], "n^2 is 0 in all 3 measured"),
        ([(n, 2 * n, 1.0) for n in (1.0, 2.0, 3.0)], "n follows from n^2 in all"),
    ],
    ids=["too few", "absent", "dependent"],
)
def test_what_cannot_be_fitted_is_named(rows: list[tuple[float, ...]], message: str) -> None:
    with pytest.raises(LatencyError, match=message.replace("^", r"\^")):
        fitted(rows, [1.0, 2.0, 3.0][: len(rows)])
