"""The largest number that fits, and the least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.policies.search import largest, least


@given(st.integers(1, 500), st.integers(0, 600), st.integers(-5, 600))
def test_it_is_found_wherever_one_begins(most: int, answer: int, near: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        assert 2 <= number <= most
        return number <= answer

    assert largest(fits, most, near) == max(min(answer, most), 1)
    assert len(set(asked)) == len(asked) <= 20


@pytest.mark.parametrize(("near", "questions"), [(60, 2), (61, 2), (59, 4), (64, 6)])
def test_few_questions_where_it_was(near: int, questions: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= 60

    assert largest(fits, 128, near) == 60
    assert len(asked) <= questions


@given(st.integers(1, 60), st.integers(0, 70), st.integers(-5, 70))
def test_the_least_is_found_wherever_one_begins(count: int, answer: int, near: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        assert 0 <= number < count
        return number >= answer

    assert least(fits, count, near) == min(answer, count)
    assert len(set(asked)) == len(asked) <= 14
