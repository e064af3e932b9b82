"""Atoms and their order, and the budgets of streams, against a fake driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.device import Budget, DeviceInfo
from smkern.errors import PartitionError
from smkern.partition.driver import GreenContext
from smkern.partition.green import probe_atoms
from smkern.partition.streams import StreamBudgets

INFO = DeviceInfo("fake", 132, (9, 0), 2, 2, 1, 1980, 1)


class FakeDriver:
    """Groups are tuples of SM ids, in an order of the test's choice; counts live contexts."""

    def __init__(self, pairs: Sequence[int]) -> None:
        self.sms = [sm for pair in pairs for sm in (2 * pair, 2 * pair + 1)]
        self.live: dict[int, tuple[int, ...]] = {}

    def split(self, min_sms: int, flags: int) -> tuple[list[Any], Any]:
        whole = len(self.sms) // min_sms * min_sms
        groups = [tuple(self.sms[i : i + min_sms]) for i in range(0, whole, min_sms)]
        return groups, tuple(self.sms[whole:]) or None

    def create(self, groups: Sequence[Any], priority: int = 0) -> GreenContext:
        stream = 1000 + len(self.live)
        self.live[stream] = tuple(sm for group in groups for sm in group)
        return GreenContext(stream, stream, len(self.live[stream]))

    def destroy(self, context: GreenContext) -> None:
        del self.live[context.stream]

    def smids(self, stream: int, num_ctas: int) -> list[int]:
        sms = self.live[stream]
        return [sms[i % len(sms)] for i in range(num_ctas)]

    def clusters(self, stream: int) -> bool | None:
        return None


@given(st.permutations(range(66)), st.sampled_from([2, 8]))
def test_atoms_cover_the_device_once_and_leave_no_context(pairs: list[int], atom: int) -> None:
    driver = FakeDriver(pairs)
    atoms = probe_atoms(driver, INFO, atom, "spread")
    parts = [*atoms.ordered, *([atoms.rest] if atoms.rest else [])]
    assert sorted(sm for part in parts for sm in part.smids) == list(range(132))
    assert atoms.num_sms == 132
    assert (len(atoms.rest.smids) if atoms.rest else 0) == 132 % atom
    assert not driver.live


@given(st.permutations(range(66)), st.integers(1, 65))
def test_a_spread_prefix_of_pairs_is_the_lowest_ids(pairs: list[int], count: int) -> None:
    atoms = probe_atoms(FakeDriver(pairs), INFO, 2, "spread")
    prefix = [sm for atom in atoms.ordered[:count] for sm in atom.smids]
    assert prefix == list(range(2 * count))


def test_streams_of_others_are_asked_for_each_time() -> None:
    counts = {77: 32}
    streams = StreamBudgets(Budget(132, "mask"), counts.get)
    assert streams.budget(77) == Budget(32, "mask", clusters=True)
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
