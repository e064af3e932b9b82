"""Atoms and their order, and the budgets of streams, against a fake driver."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.device import Budget
from smkern.errors import PartitionError
from smkern.partition.green import probe_atoms
from smkern.partition.streams import StreamBudgets
from tests.partition.conftest import INFO, FakeDriver


@given(st.permutations(range(66)), st.sampled_from([2, 8]))
def test_atoms_cover_the_device_once_and_leave_no_context(pairs: list[int], atom: int) -> None:
    driver = FakeDriver(pairs)
    atoms = probe_atoms(driver, INFO, atom, "spread")
    parts = [*atoms.ordered, *([atoms.rest] if atoms.rest else [])]
    assert sorted(sm for part in parts for sm in part.smids) == list(range(132))
    assert atoms.num_sms == 132
    assert (len(atoms.rest.smids) if atoms.rest else 0) == {2: 0, 8: 12}[atom]
    assert not driver.contexts
    assert not driver.streams


@given(st.permutations(range(66)), st.integers(1, 65))
def test_a_spread_prefix_of_pairs_is_the_lowest_ids(pairs: list[int], count: int) -> None:
    atoms = probe_atoms(FakeDriver(pairs), INFO, 2, "spread")
    prefix = [sm for atom in atoms.ordered[:count] for sm in atom.smids]
    assert prefix == list(range(2 * count))


def test_streams_of_others_are_asked_for_each_time() -> None:
    counts = {77: 32}
    streams = StreamBudgets(Budget(132, "mask"), counts.get)
    assert streams.budget(77) == Budget(32, "mask", clusters=False)
    counts[77] = 18  # the handle was destroyed and reused
    assert streams.budget(77) == Budget(18, "mask", clusters=False)
    assert streams.budget(0) == streams.budget(78) == Budget(132, "mask")


def test_a_closed_partitions_stream_raises() -> None:
    streams = StreamBudgets(Budget(132, "mask"), lambda stream: None)
    streams.add(5, Budget(16, "mask"))
    assert streams.budget(5).num_sms == 16
    streams.remove(5)
    with pytest.raises(PartitionError, match="closed"):
        streams.budget(5)


def test_a_closed_stream_is_refused_until_its_handle_may_come_back() -> None:
    counts = {5: 24}
    streams = StreamBudgets(Budget(132, "mask"), counts.get)
    streams.add(5, Budget(16, "mask"))
    streams.remove(5)
    streams.reusable(5)
    assert streams.budget(5) == Budget(24, "mask", clusters=False)
    streams.remove(5)
    streams.add(5, Budget(8, "grid"))
    assert streams.budget(5) == Budget(8, "grid")


def test_a_green_context_of_the_whole_device_is_the_whole_device() -> None:
    streams = StreamBudgets(Budget(132, "mask", clusters=True), {9: 132}.get)
    assert streams.budget(9) == Budget(132, "mask", clusters=True)


def test_listeners_hear_of_a_stream_before_it_is_closed() -> None:
    streams, heard = StreamBudgets(Budget(132, "mask"), lambda stream: None), []
    streams.at_close(heard.append)
    streams.forget(5)
    assert heard == [5]


def test_groups_of_an_unexpected_size_are_refused() -> None:
    class Rounding(FakeDriver):
        def split(self, min_sms: int, flags: int) -> tuple[list[Any], Any]:
            return super().split(4, flags)

    driver = Rounding()
    with pytest.raises(PartitionError, match=r"seen on \[4\] SMs .*try atom=8"):
        probe_atoms(driver, INFO, 2, "spread")
    assert not driver.contexts


def test_a_busy_device_is_found_out() -> None:
    """SMs that another kernel holds show up in too few contexts, or in none that spell a group."""
    driver = FakeDriver()
    driver.strays = (131,)  # the last group's, now seen in every context: no such group
    with pytest.raises(PartitionError, match=r"SM 131 showed up .* idle"):
        probe_atoms(driver, INFO, 2, "spread")
    assert not driver.contexts
    assert not driver.streams


def test_an_sm_that_the_probe_never_reached_is_found_out() -> None:
    driver = FakeDriver()
    reached = driver.smids
    driver.smids = lambda stream, n: [sm for sm in reached(stream, n) if sm != 9]  # type: ignore[method-assign]
    with pytest.raises(PartitionError, match=r"seen on \[1\] SMs .* idle"):
        probe_atoms(driver, INFO, 2, "spread")
