"""The probe of a device that is not torch's current one, against a fake driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smkern.partition.probe import Probe


class Contexts:
    """A driver that notes the device whose context is current at each call."""

    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4)

    def __init__(self) -> None:
        self.device = 0
        self.seen: list[tuple[str, int]] = []

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def CUlaunchAttribute(self) -> Any:  # noqa: N802 - the driver's name
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def CUlaunchConfig(self) -> Any:  # noqa: N802
        return SimpleNamespace()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[int, int]:
            self.seen.append((name, self.device))
            return 0, 1

        return call


def test_all_calls_are_made_in_the_context_of_the_probes_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Contexts()
    monkeypatch.setattr("cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "device", driver.current)
    probe = Probe(1)
    monkeypatch.setattr(probe, "output", lambda num_ctas: torch.zeros(num_ctas, dtype=torch.int32))
    assert probe.run(1001, 2) == [0, 0]
    assert probe.clusters(1001) is True
    assert [name for name, _ in driver.seen] == [
        "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuStreamSynchronize",
        "cuOccupancyMaxActiveClusters",
    ]  # fmt: skip
    assert {name: device for name, device in driver.seen if name != "cuModuleGetFunction"} == {
        "cuModuleLoadData": 1, "cuLaunchKernel": 1, "cuStreamSynchronize": 1,
        "cuOccupancyMaxActiveClusters": 1,
    }  # fmt: skip
    assert driver.device == 0
