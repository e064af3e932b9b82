"""Sides of splits, for tests of what holds in any partition."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import smkern
from smkern.device import Budget


def neighbours() -> Iterator[tuple[smkern.Partition, smkern.Partition]]:
    """Either side of a split with 16 and of one with 48 SMs for decode, and the other side.

    The partitions close behind the last one: let go of tensors and graphs that live there.
    """
    with smkern.ladder([16, 48]) as ladder:
        for decode, prefill in ladder:
            yield decode, prefill
            yield prefill, decode


def sides() -> Iterator[smkern.Partition]:
    """The four partitions of `neighbours`."""
    return (side for side, _ in neighbours())


def total_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def at_most(num_sms: int) -> int:
    """A budget that this device has."""
    return min(num_sms, total_sms())


def whole() -> Budget:
    """All SMs of the device, in any kernel's clusters."""
    return Budget(total_sms(), "mask", True)
