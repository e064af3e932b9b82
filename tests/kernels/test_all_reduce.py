"""The sum over GPUs: what its kernels take, and that host and device agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smkern.kernels.all_reduce import one_shot
from smkern.kernels.all_reduce.one_shot import OneShotVariant, header_bytes, memory_bytes
from smkern.kernels.cuda_source import source_folder
from tests.kernels.cubins import usage

SOURCE = (source_folder() / "all_reduce" / "one_shot.cu").read_text()


@pytest.mark.parametrize(
    ("ranks", "dtype", "mode", "vectors"),
    [(2, "bf16", "norm", 4), (2, "bf16", "add", 5), (8, "bf16", "norm", 5), (4, "fp16", "sum", 1),
     (2, "bf16", "norm", 16)],
)  # fmt: skip
def test_kernels_spill_nothing(
    ranks: int, dtype: str, mode: str, vectors: int, tmp_path: Path
) -> None:
    cubin = OneShotVariant(ranks, dtype, mode, vectors, 90).compile()
    registers, stack = usage(cubin, tmp_path)
    assert registers <= 128  # 512 threads
    assert stack <= 8  # of eight ranks an address; rows are all in registers


def test_host_and_device_agree_on_sizes() -> None:
    def of(name: str) -> int:
        found = re.search(rf"constexpr int {name} = (\d+);", SOURCE)
        assert found
        return int(found[1])

    assert of("kMaxCtas") == one_shot.MAX_CTAS
    assert of("kGroup") == one_shot.GROUP
    assert of("kGroups") == one_shot.ROWS
    words = re.search(r"u32 pad\[(\d+)\];", SOURCE)
    assert words
    # flags, two counters, padding
    assert header_bytes(4) == 4 * (4 * one_shot.MAX_CTAS + 2 + int(words[1]))
    assert header_bytes(2) % 128 == 0


def test_memory_has_two_halves_of_a_slot_a_rank() -> None:
    assert memory_bytes(2, 1 << 20) - header_bytes(2) == 4 << 20
