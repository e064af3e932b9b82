"""A device to plan for, so that no test depends on a measured profile."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Facts:
    """Device facts of an H200's size."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    num_sms: int = 132
    sm_clock_mhz: int = 1980
    l2_bytes: int = 60 * 2**20


@dataclass(frozen=True, slots=True)
class FlatProfile:
    """Ceilings that rise with the SMs and saturate: 0.2 TB/s an SM, then 4.5; 8.1, then power."""

    info: Facts = Facts()

    def bandwidth(self, num_sms: int, *, confined: str = "mask") -> float:
        return min(0.2 * num_sms, 4.5)

    def flops(self, num_sms: int) -> float:
        return min(8.1 * num_sms, 500 + 2 * num_sms)


@pytest.fixture(scope="session")
def profile() -> FlatProfile:
    return FlatProfile()


@pytest.fixture(scope="session")
def ampere() -> FlatProfile:
    return FlatProfile(Facts("NVIDIA A100", (8, 0), 108, 1410, 40 * 2**20))
