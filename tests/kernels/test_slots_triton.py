"""The kernel that changes rows of requests, compiled for devices that are absent."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from smkern.kernels import slots_launch, slots_triton
from smkern.kernels.slots_launch import PARAMETERS, SlotVariant, grids

triton = pytest.importorskip("triton")

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def told(cubin: bytes, folder: Path, *options: str) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [CUOBJDUMP, *options, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_parameters_are_packed_in_the_kernels_order() -> None:
    names = slots_triton.update_slots.arg_names
    assert names == [*PARAMETERS, *SlotVariant(8, 90).constants]


@pytest.mark.parametrize("name", ["RECORD", "FIELDS", "SET_VALUES", "SET_FINISHED", "FINISHED"])
def test_host_and_device_agree_on_records(name: str) -> None:
    assert getattr(slots_triton, name).value == getattr(slots_launch, name)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("stop_tokens", [1, 8, 64])
def test_a_warp_holds_a_row_and_spills_nothing(
    stop_tokens: int, capability: int, tmp_path: Path
) -> None:
    artifact = SlotVariant(stop_tokens, capability).compile()
    assert (artifact.num_threads, artifact.shared_bytes) == (32, 0)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", told(artifact.cubin, tmp_path, "-res-usage"))
    assert usage
    assert int(usage[1]) <= 128
    assert int(usage[2]) == 0


@pytest.mark.parametrize(
    ("limit", "wanted"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_grids_end_at_the_budget(limit: int, wanted: tuple[int, ...]) -> None:
    assert grids(limit) == wanted
