"""Ladders planned from facts alone, and made of them."""

from __future__ import annotations

import pytest

import smkern
from smkern.errors import ArgumentError, BudgetError
from smkern.partition import plan_ladder
from smkern.partition.driver import IGNORE_COSCHEDULING
from tests import gpus
from tests.partition.conftest import FakeDriver, fake_machine


@pytest.mark.parametrize(
    ("info", "atom", "last"),
    [
        (gpus.H200, 2, 120),
        (gpus.H100, 2, 120),
        (gpus.H100_PCIE, 2, 104),
        (gpus.H20, 2, 64),
        (gpus.A100, 4, 96),
        (gpus.L40S, 4, 128),
        (gpus.B200, 2, 136),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_default_rungs_are_eights_that_leave_prefill_eight(info, atom, last) -> None:
    plan = plan_ladder(info)
    assert (plan.device, plan.num_sms, plan.atom) == (info.name, info.num_sms, atom)
    assert plan.rungs == tuple(range(8, last + 1, 8))
    assert info.num_sms - last >= 8
    assert f"of the {info.num_sms} SMs of this {info.name} in atoms of {atom}: decode 8" in str(
        plan
    )


def test_a_slice_of_few_sms_has_rungs() -> None:
    assert plan_ladder(gpus.SLICE).rungs == (8,)
    assert plan_ladder(gpus.TINY_SLICE).rungs == (4, 8)
    assert str(plan_ladder(gpus.SLICE)).startswith("1 rung of the 16 SMs")


@pytest.mark.parametrize("info", [gpus.H200, *gpus.FOREIGN], ids=gpus.by_name)
def test_any_atom_that_is_taken_has_default_rungs(info) -> None:
    for atom in range(info.sm_granularity, info.num_sms // 2 + 1, info.sm_granularity):
        rungs = plan_ladder(info, atom=atom).rungs
        assert rungs
        assert all(n % atom == 0 and n <= info.num_sms - rungs[0] for n in rungs)
    assert plan_ladder(gpus.H200, atom=6).rungs == tuple(range(12, 121, 12))


def test_named_rungs_and_atoms() -> None:
    assert plan_ladder(gpus.B200, [64, 16]).rungs == (16, 64)
    assert plan_ladder(gpus.A100, atom=12).rungs == tuple(range(12, 97, 12))
    for rungs, atom in (([148], None), ([6], 4), ([0], None), ([], None), (None, 75)):
        with pytest.raises(BudgetError):
            plan_ladder(gpus.B200, rungs, atom=atom)


@pytest.mark.parametrize(
    ("info", "atom", "said"),
    [
        (gpus.A100, 1, "in multiples of 4 up to 52; leave it out$"),
        (gpus.A100, 2, "in multiples of 4 up to 52; leave it out$"),
        (gpus.TINY_SLICE, 8, "in multiples of 4 up to 4; leave it out$"),
        (gpus.H200, 3, "in multiples of 2 up to 66; leave it out, or take 8 for clusters$"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_atoms_that_the_driver_has_not_are_refused(info, atom, said) -> None:
    for rungs in (None, [12]):
        with pytest.raises(BudgetError, match=f"atom={atom}: .*{said}"):
            plan_ladder(info, rungs, atom=atom)


@pytest.mark.parametrize("info", [gpus.H200, *gpus.FOREIGN], ids=gpus.by_name)
def test_a_ladder_of_each_gpu_has_the_planned_rungs(info) -> None:
    newer = info.capability >= (9, 0)
    flag = IGNORE_COSCHEDULING if newer else 0
    driver = FakeDriver(range(info.num_sms // 2), small_flag=flag)
    with fake_machine(driver, info), smkern.ladder() as made:
        assert made.backend == "green"
        assert made.rungs == plan_ladder(info).rungs
        for decode, prefill in made:
            assert decode.num_sms + prefill.num_sms == info.num_sms
            assert newer or not (decode.clusters or prefill.clusters)


def test_a_name_is_no_device() -> None:
    with pytest.raises(ArgumentError, match=r"info='h200': pass a DeviceInfo"):
        plan_ladder("h200")  # type: ignore[arg-type]
