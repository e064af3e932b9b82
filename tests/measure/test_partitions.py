from __future__ import annotations

from typing import Any

import pytest

from smkern.device import Budget, DeviceInfo
from smkern.measure import partitions
from smkern.measure.partitions import Partitions, side_for
from smkern.partition.driver import IGNORE_COSCHEDULING
from tests import gpus
from tests.partition.conftest import FakeDriver, fake_machine


@pytest.mark.parametrize(
    ("num_sms", "spread", "default"),
    [
        (16, (16, "decode"), (16, "decode")),
        (60, (60, "decode"), (72, "prefill")),
        (66, (66, "decode"), None),
        (72, (60, "prefill"), (72, "decode")),
        (84, (48, "prefill"), (48, "prefill")),
        (100, (32, "prefill"), (32, "prefill")),
        (116, (16, "prefill"), (16, "prefill")),
        (118, (14, "prefill"), None),
        (17, None, None),
        (132, None, None),
        (0, None, None),
    ],
)
def test_which_side_of_which_split_holds_a_budget(num_sms, spread, default):
    assert side_for(num_sms, gpus.H200, "spread") == spread
    assert side_for(num_sms, gpus.H200, "default") == default


@pytest.mark.parametrize(
    ("info", "num_sms", "spread"),
    [
        (gpus.A100, 10, None),
        (gpus.A100, 12, (12, "decode")),
        (gpus.A100, 84, (24, "prefill")),
        (gpus.L40S, 126, (16, "prefill")),
        (gpus.L40S, 132, (132, "decode")),
        (gpus.L40S, 134, (8, "prefill")),
        (gpus.L40S, 140, None),
        (gpus.B200, 146, (2, "prefill")),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_sides_of_other_gpus_are_of_their_granularity(info, num_sms, spread) -> None:
    assert side_for(num_sms, info, "spread") == spread


@pytest.mark.parametrize("info", [gpus.H200, *gpus.FOREIGN], ids=gpus.by_name)
def test_every_gpu_has_places(info, monkeypatch) -> None:
    """The driver's groups have no fewer SMs than its granularity, whatever is asked."""
    flag = IGNORE_COSCHEDULING if info.capability >= (9, 0) else 0
    gpus.install(monkeypatch, info)
    budgets = [n for n in range(1, info.num_sms, 7) if side_for(n, info, "spread")]
    with fake_machine(Grouped(info, flag), info) as machine:
        machine.patch.setattr(partitions, "budget_of_stream", lambda *_: Budget(info.num_sms))
        with Partitions(budgets, ("spread",)) as places:
            assert budgets
            for num_sms in budgets:
                place = places.at(num_sms)
                assert place is not None
                assert place.budget.num_sms == num_sms


class Grouped(FakeDriver):
    """A driver whose groups have as many SMs as a device's granularity at least."""

    def __init__(self, info: DeviceInfo, flag: int) -> None:
        super().__init__(range(info.num_sms // 2), small_flag=flag)
        self.least = info.sm_granularity

    def split(self, min_sms: int, flags: int) -> Any:
        return super().split(max(min_sms, self.least), flags)
