"""Garbage collection while a process serves."""

from __future__ import annotations

import gc

import pytest

from smkern.garbage import FULL_AFTER, seldom_collected


def test_full_collections_are_seldom_inside_alone() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), seldom_collected():
        assert gc.get_threshold() == (*before[:2], FULL_AFTER)
        assert gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_threshold() == before


def test_what_others_froze_stays_so() -> None:
    gc.freeze()  # the tests' own conftest has, too
    with seldom_collected():
        pass
    assert gc.get_freeze_count() > 1000
