"""Measurements of a device that is not there: the cost model with other constants, and noise."""

import random
from dataclasses import asdict, dataclass

import pytest

from smkern.autotune.raw import Measurement
from smkern.autotune.shortlist import problems, shortlist
from smkern.tuning.config import Budget
from smkern.tuning.cost_model import DEFAULTS, CostConstants, predict_us


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
    """Ceilings that rise with the SMs and saturate."""

    info: Facts = Facts()

    def bandwidth(self, num_sms: int, *, confined: str = "mask") -> float:
        return min(0.2 * num_sms, 4.5)

    def flops(self, num_sms: int) -> float:
        return min(8.1 * num_sms, 500 + 2 * num_sms)


@pytest.fixture(scope="session")
def profile() -> FlatProfile:
    return FlatProfile()


@pytest.fixture(scope="session")
def truth() -> CostConstants:
    """Constants of the imagined device: each is off by up to 60%."""
    chance = random.Random(3)
    values = {name: value * chance.uniform(0.6, 1.6) for name, value in asdict(DEFAULTS).items()}
    return CostConstants(**{**values, "blend": DEFAULTS.blend})


@pytest.fixture(scope="session")
def measurements(profile: FlatProfile, truth: CostConstants) -> list[Measurement]:
    """A sweep of 80 cells with 8 candidates each and 2% of noise."""
    chance = random.Random(5)
    found = []
    for problem in problems([(6144, 4096), (4096, 14336)], [1, 16, 77, 256, 1000, 2048, 8192]):
        for num_sms in (16, 48, 72, 100, 116):
            budget = Budget(num_sms, "mask", False)
            for item in shortlist(problem, budget, profile, DEFAULTS):
                us = predict_us(problem, item.config, budget, profile, truth)
                us *= chance.gauss(1, 0.02)
                found.append(Measurement(problem, budget, item.config, us, 0.01, item.predicted_us))
    return found
