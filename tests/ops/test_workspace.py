"""Workspaces: one a stream, one a capture or a shared one; counters zero at the head of each."""

from __future__ import annotations

import pytest
import torch

from smkern.ops.workspace import Scratch, Workspaces
from smkern.tuning.constraints import COUNTER_BYTES


class Runtime:
    capturing, capture = False, 0


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def shared():
    """What raw streams share."""
    return {}


@pytest.fixture
def workspaces(runtime, shared):
    return Workspaces(
        torch.device("cpu"), lambda: runtime.capturing, lambda stream: runtime.capture, shared
    )


def counters(workspaces, stream):
    return workspaces._of_streams[stream].tensor[:COUNTER_BYTES]


def test_a_stream_keeps_its_own(workspaces):
    first = workspaces.pointer(1, COUNTER_BYTES)
    assert workspaces.pointer(1, 1000) == first
    assert workspaces.pointer(2, 1000) != first
    assert not counters(workspaces, 1).any()


def test_it_grows_and_the_counters_are_zero_again(workspaces):
    workspaces.pointer(1, COUNTER_BYTES)
    counters(workspaces, 1).fill_(3)
    workspaces.pointer(1, 8 << 20)
    assert workspaces._of_streams[1].num_bytes == 8 << 20
    assert not counters(workspaces, 1).any()


def test_a_capture_gets_its_own_and_the_next_one_another(workspaces, runtime):
    eager = workspaces.pointer(1, 1000)
    runtime.capturing, runtime.capture = True, 11
    first = workspaces.pointer(1, 1000)
    held = workspaces._of_captures[1].tensor
    assert first != eager
    assert workspaces.pointer(1, 1000) == first
    runtime.capture = 12
    assert workspaces.pointer(1, 1000) != first
    assert held.data_ptr() == first
    runtime.capturing = False
    assert workspaces.pointer(1, 1000) == eager


def test_two_streams_of_one_capture_do_not_share(workspaces, runtime):
    runtime.capturing, runtime.capture = True, 11
    assert workspaces.pointer(1, 1000) != workspaces.pointer(2, 1000)


def test_discard_forgets(workspaces):
    workspaces.pointer(1, 1000)
    counters(workspaces, 1).fill_(3)
    workspaces.discard(1)
    workspaces.pointer(1, 1000)
    assert not counters(workspaces, 1).any()
    workspaces.discard(99)


@pytest.fixture
def scratch(shared):
    made = Scratch(torch.device("cpu"))
    shared[1] = shared[2] = made
    return made


def shared_counters(scratch, owner):
    return scratch._held[owner].tensor[:COUNTER_BYTES]


def test_streams_and_captures_share_a_scratch(workspaces, runtime, shared, scratch):
    first = workspaces.pointer(1, 3 << 20)
    assert workspaces.pointer(2, 1000) == first
    for capture in (11, 12):
        runtime.capturing, runtime.capture = True, capture
        assert workspaces.pointer(1, 3 << 20) == workspaces.pointer(2, 1000) == first
    assert workspaces.pointer(3, 1000) != first
    assert scratch.num_bytes == 3 << 20
    assert not workspaces._of_streams
    shared.clear()
    runtime.capturing = False
    assert workspaces.pointer(1, 1000) != first


def test_each_capture_zeroes_the_shared_counters_once(workspaces, runtime, scratch):
    workspaces.pointer(1, 1000)
    found = shared_counters(scratch, workspaces)
    for capture in (11, 12, 0, 13):
        found.fill_(3)
        runtime.capturing, runtime.capture = capture > 0, capture
        workspaces.pointer(1, 1000)
        assert not found.any()
        found.fill_(3)
        workspaces.pointer(1, 1000)
        assert found.all()


def test_a_capture_that_needs_more_than_is_shared_gets_its_own(workspaces, runtime, scratch):
    small = workspaces.pointer(1, 1000)
    runtime.capturing, runtime.capture = True, 11
    own = workspaces.pointer(1, 2 << 20)
    assert own != small
    assert scratch.num_bytes == 1 << 20
    assert workspaces.pointer(1, 1000) == small
    assert workspaces.pointer(1, 2 << 20) == own


def test_what_a_capture_uses_stays_when_it_is_outgrown(workspaces, runtime, scratch):
    workspaces.pointer(1, 1000)
    workspaces.pointer(1, 2 << 20)
    assert scratch.num_bytes == 2 << 20
    runtime.capturing, runtime.capture = True, 11
    workspaces.pointer(1, 1000)
    held = scratch._held[workspaces].tensor
    runtime.capturing = False
    workspaces.pointer(1, 3 << 20)
    assert scratch.num_bytes == 5 << 20
    assert any(held is x for x in scratch._outgrown)


def test_owners_do_not_share_with_each_other(workspaces, runtime, shared, scratch):
    other = Workspaces(torch.device("cpu"), lambda: False, lambda stream: 0, shared)
    assert workspaces.pointer(1, 1000) != other.pointer(1, 1000)


def test_a_failed_launch_leaves_no_counters_behind(workspaces, scratch):
    pointer = workspaces.pointer(1, 1000)
    found = shared_counters(scratch, workspaces).fill_(3)
    workspaces.discard(1)
    assert workspaces.pointer(1, 1000) == pointer
    assert not found.any()


def test_a_scratch_on_a_cpu_changes_nothing():
    with Scratch(torch.device("cpu")).on():
        pass
