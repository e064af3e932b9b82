"""Where cells are measured: both sides of one ladder, and the whole device without a mask."""

from types import SimpleNamespace

import pytest
import torch

from smkern.autotune import places
from smkern.autotune.operators import OPERATORS, Options
from smkern.autotune.places import absent_places, absent_sides, ladder_sides, opened
from smkern.measure import partitions
from smkern.measure.gemm import BUDGETS as GEMM_BUDGETS
from smkern.partition import plan_ladder
from smkern.tuning.config import Budget
from tests import gpus


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
                    num_sms=n, budget=Budget(n, "mask", n > 66), stream=f"{side} of {decode}"
                )
                for side, n in sides.items()
            }
        )

    def __iter__(self):
        return iter([self.split(rung) for rung in self.rungs])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True


@pytest.fixture
def fake_device(monkeypatch):
    def use(generous=()):
        def ladder(rungs=(8, 64, 120), **options):
            return FakeLadder(rungs, generous)

        monkeypatch.setattr(partitions, "ladder", ladder)
        monkeypatch.setattr("smkern.partition.ladder", ladder)

    for module in (places, partitions):
        monkeypatch.setattr(module, "device_info", lambda index=0: gpus.H200)
        monkeypatch.setattr(module, "release_library_workspaces", lambda: None)
    monkeypatch.setattr(
        partitions, "budget_of_stream", lambda stream, device: Budget(132, "mask", True)
    )
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return use


def test_large_budgets_are_complements_of_small_ones(fake_device):
    fake_device()
    with opened([16, 100, 132, 32], ("mask",)) as found:
        assert FakeLadder.made.rungs == [16, 32]
        whole, *parts = found
        assert whole.budget == Budget(132, "mask", True)
        assert {(p.budget.num_sms, p.stream) for p in parts} == {
            (16, "decode of 16"),
            (32, "decode of 32"),
            (100, "prefill of 32"),
        }
        assert {p.budget.clusters for p in parts if p.budget.num_sms > 66} == {True}
    assert FakeLadder.made.closed


def test_a_budget_that_is_not_granted_exactly_is_left_out(fake_device, capsys):
    fake_device(generous=[16])
    with opened([15, 16, 32], ("mask",)) as found:
        assert [p.budget.num_sms for p in found] == [32]
    assert "no partition of [15, 16] SMs on this device: left out" in capsys.readouterr().out


def test_without_masks_all_share_a_plain_stream(fake_device):
    fake_device()
    with opened([16, 132], ("grid",)) as found:
        assert {p.budget for p in found} == {Budget(16, "grid", True), Budget(132, "mask", True)}
        assert len({id(p.stream) for p in found}) == 1


def test_a_servers_sides_are_those_of_the_default_ladder(fake_device):
    fake_device()
    with ladder_sides() as sides:
        assert [p.budget.num_sms for p in sides.decode] == [8, 64, 120]
        assert [p.budget.num_sms for p in sides.prefill] == [124, 68, 12]
        assert sides.prefill[1].stream == "prefill of 64"
        assert sides.whole.budget == Budget(132, "mask", True)
        some = sides.only([64, 12])
        assert [p.budget.num_sms for p in (*some.decode, *some.prefill)] == [64, 12]
    assert FakeLadder.made.closed


def test_the_sides_of_an_absent_device_are_multiples_of_eight_and_complements():
    sides = absent_sides(gpus.H200)
    assert [p.budget.num_sms for p in sides.decode] == list(range(8, 125, 8))
    assert [p.budget.num_sms for p in sides.prefill] == list(range(124, 11, -8))[:15]
    assert sides.decode[0].budget == Budget(8, "mask", False)
    assert sides.prefill[0].budget == Budget(124, "mask", True)


@pytest.mark.parametrize("info", [gpus.H200, *gpus.FOREIGN], ids=gpus.by_name)
def test_absent_places_are_those_of_the_device(info):
    work, total = OPERATORS["gemm"](Options()), info.num_sms
    masks = [place.budget for place in absent_places(work.budgets, ("mask",), info)]
    counts = [budget.num_sms for budget in masks]
    usual = [n for n in GEMM_BUDGETS if n < total and n % info.sm_granularity == 0]
    assert counts == [total, *usual]
    assert masks[0] == Budget(total, "mask", True)
    grids = {place.budget for place in absent_places([16, 500], ("grid",), info)}
    assert grids == {Budget(total, "mask", True), *([Budget(16, "grid", True)] * (total > 16))}


@pytest.mark.parametrize("info", gpus.FOREIGN, ids=gpus.by_name)
def test_the_sides_of_absent_devices_are_those_of_their_ladders(info):
    sides = absent_sides(info)
    assert tuple(place.num_sms for place in sides.decode) == plan_ladder(info).rungs
    pairs = zip(sides.decode, sides.prefill, strict=True)
    assert {a.num_sms + b.num_sms for a, b in pairs} == {info.num_sms}
