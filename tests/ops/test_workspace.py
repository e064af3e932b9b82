"""Workspaces: one a stream, one a capture, counters zero at the head of each."""

from __future__ import annotations

import pytest
import torch

from smkern.ops.workspace import Workspaces
from smkern.tuning.space import COUNTER_BYTES


class Runtime:
    capturing, capture = False, 0


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def workspaces(runtime):
    return Workspaces(
        torch.device("cpu"), lambda: runtime.capturing, lambda stream: runtime.capture
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
