"""The kernel that changes rows of requests, compiled for devices that are absent."""

from __future__ import annotations

import pytest

from smkern.kernels import slots_launch, slots_triton
from smkern.kernels.slots_launch import PARAMETERS, SlotVariant, grids
from tests.kernels.cubins import usage


def test_parameters_are_packed_in_the_kernels_order() -> None:
    names = slots_triton.update_slots.arg_names
    assert names == [*PARAMETERS, *SlotVariant(8, 90).constants]


@pytest.mark.parametrize("name", ["RECORD", "FIELDS", "SET_VALUES", "SET_FINISHED", "FINISHED"])
def test_host_and_device_agree_on_records(name: str) -> None:
    assert getattr(slots_triton, name).value == getattr(slots_launch, name)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("stop_tokens", [1, 8, 64])
def test_a_warp_holds_a_row_and_spills_nothing(stop_tokens, capability, tmp_path) -> None:
    artifact = SlotVariant(stop_tokens, capability).compile()
    assert (artifact.num_threads, artifact.shared_bytes) == (32, 0)
    registers, stack = usage(artifact, tmp_path)
    assert registers <= 128
    assert stack == 0


@pytest.mark.parametrize(
    ("limit", "wanted"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_grids_end_at_the_budget(limit: int, wanted: tuple[int, ...]) -> None:
    assert grids(limit) == wanted
