"""Fixtures of the tests that need a GPU; without one none of them is collected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import smkern
from smkern.kernels.cute import compile as cute


@pytest.fixture(scope="session")
def device() -> int:
    """Index of the GPU under test."""
    return torch.cuda.current_device()


@pytest.fixture(autouse=True)
def _awaited() -> Iterator[None]:
    """A device error surfaces in the test that caused it, not in the next one."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def ladder() -> Iterator[smkern.Ladder]:
    """Partitions of 16 and of 40 SMs, and what they leave."""
    with smkern.ladder([16, 40]) as made:
        yield made


@pytest.fixture(scope="module")
def cutlass_is_there() -> Iterator[None]:
    """Choices see the extra, which `only_what_is_always_there` hides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute, "is_there", lambda: True)
        yield
