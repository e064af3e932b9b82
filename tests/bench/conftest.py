"""Suites without a device: partitions on a virtual clock, a meter that stands still."""

from __future__ import annotations

from functools import partial

import pytest

from smkern.profile import load_profile
from tests.bench.doubles import FakePartitions, Meter
from tests.measure.fake_cuda import FakeCuda, cuda

__all__ = ["cuda"]


@pytest.fixture
def virtual_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """An H200 for suites of groups: every even budget is there, launches take what they say."""
    info = load_profile("h200").info
    for name in ("cases", "cliffs", "untuned"):
        monkeypatch.setattr(f"smkern.bench.{name}.device_info", lambda: info)
    monkeypatch.setattr("smkern.bench.frame.Partitions", partial(FakePartitions, cuda))
    monkeypatch.setattr("smkern.bench.frame.power_meter", Meter)
    monkeypatch.setattr("smkern.bench.frame.trim_memory", lambda *keep: None)
    return cuda
