"""Where cells are measured: both sides of one ladder, and the whole device without a mask."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from smkern.autotune import places
from smkern.autotune.places import Places
from smkern.tuning.config import Budget


class FakeLadder:
    """Grants every rung as asked, or 2 SMs more of those in `generous`."""

    made = None

    def __init__(self, rungs, generous=()):
        self.rungs, self.generous, self.closed = rungs, generous, False
        FakeLadder.made = self

    def split(self, decode):
        granted = decode + 2 * (decode in self.generous)
        sides = {"decode": granted, "prefill": 132 - granted}
        return SimpleNamespace(
            **{
                side: SimpleNamespace(
                    num_sms=n, confined="mask", clusters=n > 66, stream=f"{side} of {decode}"
                )
                for side, n in sides.items()
            }
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True


@pytest.fixture
def fake_device(monkeypatch):
    def use(generous=()):
        partition = ModuleType("smkern.partition")
        partition.ladder = lambda rungs, **options: FakeLadder(rungs, generous)
        monkeypatch.setitem(sys.modules, "smkern.partition", partition)

    monkeypatch.setattr(places, "device_info", lambda index: SimpleNamespace(num_sms=132))
    monkeypatch.setattr(places, "release_library_workspaces", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "plain")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return use


def test_large_budgets_are_complements_of_small_ones(fake_device):
    fake_device()
    made = Places([16, 100, 132, 32])
    with made as found:
        assert FakeLadder.made.rungs == [16, 32]
        assert {(p.budget.num_sms, p.stream, p.neighbour_stream) for p in found} == {
            (16, "decode of 16", "prefill of 16"),
            (32, "decode of 32", "prefill of 32"),
            (100, "prefill of 32", "decode of 32"),
            (132, "plain", None),
        }
        assert {p.budget for p in found if p.budget.num_sms > 66} == {
            Budget(100, "mask", True),
            Budget(132, "mask", True),
        }
    assert FakeLadder.made.closed
    assert made.missing == []


def test_a_budget_that_is_not_granted_exactly_is_left_out(fake_device):
    fake_device(generous=[16])
    made = Places([15, 16, 32])
    with made as found:
        assert [p.budget.num_sms for p in found] == [32]
        assert made.missing == [15, 16]


def test_without_masks_all_share_a_plain_stream(fake_device):
    fake_device()
    with Places([16, 132], ("grid",)) as found:
        assert [(p.budget, p.stream) for p in found] == [
            (Budget(16, "grid", True), "plain"),
            (Budget(132, "mask", True), "plain"),
        ]
