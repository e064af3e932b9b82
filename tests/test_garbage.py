"""Garbage collection while a process serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from smkern.garbage import FULL_AFTER, collect_young, seldom_collected


def test_full_collections_are_seldom_inside_alone() -> None:
    before = gc.get_threshold()
    with seldom_collected():
        assert gc.get_threshold() == (*before[:2], FULL_AFTER)
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == before


def test_what_others_froze_stays_so() -> None:
    gc.freeze()  # the tests' own conftest has, too
    with seldom_collected():
        pass
    assert gc.get_freeze_count() > 1000


@pytest.fixture
def held() -> Iterator[list[list[int]]]:
    """Objects that nothing has looked at yet, half of what makes a collection due and more."""
    gc.collect()
    first, _, _ = gc.get_threshold()
    yield [[i] for i in range(first // 2 + 50)]
    gc.enable()


def test_what_is_young_is_collected_where_that_is_due_soon(held: list[list[int]]) -> None:
    assert 2 * gc.get_count()[0] > gc.get_threshold()[0]
    collect_young()
    assert 2 * gc.get_count()[0] < gc.get_threshold()[0]
    middle = gc.get_count()[1]
    collect_young()
    assert gc.get_count()[1] == middle  # not before there is something again


def test_collecting_that_is_off_stays_off(held: list[list[int]]) -> None:
    gc.disable()
    before = gc.get_count()[0]
    collect_young()
    assert gc.get_count()[0] >= before


def test_the_next_generation_goes_with_the_young() -> None:
    gc.collect()
    first, second, _ = gc.get_threshold()
    kept: list[list[int]] = []
    for done in range(second // 2 + 1):
        assert gc.get_count()[1] == done
        kept += [[i] for i in range(first // 2 + 50)]
        collect_young()
    kept += [[i] for i in range(first // 2 + 50)]
    collect_young()
    assert gc.get_count()[1] == 0
