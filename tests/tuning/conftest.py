"""A device to plan for, so that no test depends on a measured profile."""

from dataclasses import dataclass

import pytest

from smkern.device import DeviceInfo
from tests import gpus


@dataclass(frozen=True, slots=True)
class FlatProfile:
    """Ceilings that rise with the SMs and saturate: 0.2 TB/s an SM, then 4.5; 8.1, then power."""

    info: DeviceInfo = gpus.H200

    def bandwidth(self, num_sms: int, *, confined: str = "mask") -> float:
        return min(0.2 * num_sms, 4.5)

    def flops(self, num_sms: int) -> float:
        return min(8.1 * num_sms, 500 + 2 * num_sms)


@pytest.fixture(scope="session")
def profile() -> FlatProfile:
    return FlatProfile()


@pytest.fixture(scope="session")
def ampere() -> FlatProfile:
    return FlatProfile(gpus.A100)
