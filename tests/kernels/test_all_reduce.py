"""The sum over GPUs: what its kernels take, and that host and device agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smkern.kernels.all_reduce import exchange, one_shot
from smkern.kernels.all_reduce.exchange import header_bytes, memory_bytes
from smkern.kernels.all_reduce.gather import gather_variant
from smkern.kernels.all_reduce.one_shot import one_shot_variant
from smkern.kernels.cuda_source import source_folder
from tests.kernels.cubins import usage

SOURCE = "".join(path.read_text() for path in (source_folder() / "all_reduce").iterdir())


@pytest.mark.parametrize(
    ("ranks", "dtype", "mode", "vectors"),
    [(2, "bf16", "norm", 2), (2, "bf16", "norm", 3), (2, "bf16", "add", 3), (8, "bf16", "norm", 3),
     (4, "fp16", "sum", 1), (2, "bf16", "norm", 8)],
)  # fmt: skip
def test_kernels_spill_nothing(ranks, dtype, mode, vectors, tmp_path) -> None:
    cubin = one_shot_variant(ranks, dtype, mode, vectors, 90).compile()
    registers, stack = usage(cubin, tmp_path)
    # 512 threads; of two ranks and up to 5,120 numbers a row both lanes' sums fit an SM at once
    assert registers <= (64 if vectors <= 3 and ranks == 2 else 128)
    assert stack <= 8  # of eight ranks an address; rows are all in registers


@pytest.mark.parametrize("ranks", [2, 8])
def test_gathering_spills_nothing(ranks: int, tmp_path: Path) -> None:
    registers, stack = usage(gather_variant(ranks, 90).compile(), tmp_path)
    assert registers <= 64
    assert stack <= 8


def test_host_and_device_agree_on_sizes() -> None:
    def of(name: str) -> int:
        found = re.search(rf"constexpr int {name} = (\d+);", SOURCE)
        assert found
        return int(found[1])

    assert of("kMaxCtas") == exchange.MAX_CTAS
    assert of("kThreads") == of("kGroup") * of("kGroups") == exchange.THREADS
    assert of("kGroup") == one_shot.GROUP
    words = re.search(r"u32 pad\[(\d+)\];", SOURCE)
    assert words
    # flags, two counters, padding
    assert header_bytes(4) == 4 * (4 * exchange.MAX_CTAS + 2 + int(words[1]))
    assert header_bytes(2) % 128 == 0


def test_memory_has_two_halves_of_a_slot_for_each_other_rank() -> None:
    assert memory_bytes(2, 1 << 20) - header_bytes(2) == 2 << 20
    assert memory_bytes(4, 1 << 20) - header_bytes(4) == 6 << 20
