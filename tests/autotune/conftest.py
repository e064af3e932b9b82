"""Measurements of a device that is not there: the cost model with other constants, and noise."""

import random

import pytest
import torch

from smkern.autotune import measure
from smkern.autotune.raw import Measurement
from smkern.autotune.shortlist import problems, shortlist
from smkern.measure.timing import Timing
from smkern.tuning.config import Budget
from smkern.tuning.cost_constants import DEFAULTS, NAMES, CostConstants
from smkern.tuning.cost_model import predict_us
from tests.tuning.conftest import FlatProfile, profile

__all__ = ["profile"]


@pytest.fixture(scope="session")
def truth() -> CostConstants:
    """Constants of the imagined device: each is off by up to 60%."""
    chance = random.Random(3)
    values = {name: getattr(DEFAULTS, name) * chance.uniform(0.6, 1.6) for name in NAMES}
    return CostConstants(**{**values, "blend": DEFAULTS.blend})


@pytest.fixture(scope="session")
def measurements(profile: FlatProfile, truth: CostConstants) -> list[Measurement]:
    """A sweep of 80 cells with 8 candidates each and 2% of noise."""
    chance = random.Random(5)
    found = []
    for problem in problems([(6144, 4096), (4096, 14336)], [1, 16, 77, 256, 1000, 2048, 8192]):
        for num_sms in (16, 48, 72, 100, 116):
            budget = Budget(num_sms, "mask", False)
            for config, predicted_us in shortlist(problem, budget, profile, DEFAULTS).items():
                us = predict_us(problem, config, budget, profile, truth)
                us *= chance.gauss(1, 0.02)
                found.append(Measurement(problem, budget, config, us, 0.01, predicted_us))
    return found


@pytest.fixture
def timed(request, monkeypatch):
    """The rounds that were asked for: [(names, rounds, calls a graph)].

    A case is known by its place among the good ones, and takes what the module's `SPEED` has there.
    """
    asked = []

    def time_interleaved(cases, *, rounds, errors):
        asked.append((sorted(cases), rounds, [case.calls for case in cases.values()]))
        for case in cases.values():
            case.call(case.first_set)
        speeds = [*request.module.SPEED.values()]
        return {name: Timing((speeds[int(name)],) * rounds) for name in cases}

    def try_eagerly(call, stream):
        call(0)

    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    monkeypatch.setattr(measure, "try_eagerly", try_eagerly)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return asked
