"""The sum over GPUs: what its kernels take, and that host and device agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smkern.kernels.all_reduce import exchange, one_shot, peer_memory
from smkern.kernels.all_reduce.exchange import COPY_SLOTS, header_bytes, memory_bytes
from smkern.kernels.all_reduce.gather import gather_variant
from smkern.kernels.all_reduce.one_shot import one_shot_variant
from smkern.kernels.all_reduce.peer_memory import Copies
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


def test_sums_of_copied_rows_spill_nothing(tmp_path: Path) -> None:
    variant = one_shot_variant(2, "bf16", "norm", 3, 90, copied=True)
    registers, stack = usage(variant.compile(), tmp_path)
    assert registers <= 64
    assert stack == 0


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


def test_copies_take_slots_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, and behind them their number, to where the kernel of the other rank looks."""
    log: list[tuple[int, ...]] = []
    monkeypatch.setattr(peer_memory, "copy_async", lambda: lambda *given: log.append(given) or 0)
    monkeypatch.setattr(peer_memory, "_write_value", lambda: lambda *given: log.append(given) or 0)
    base, slot_bytes, ranks, rank = 1 << 40, 1 << 20, 3, 1
    copies = Copies(rank, [base, 2 * base, 3 * base], slot_bytes)
    for call in range(1, 2 * COPY_SLOTS + 1):
        assert copies.begin() == call
        copies.send(call, 7, 4096, 99)
        written = []
        for to in (0, 2):
            # two others send to each: to rank 0 this one is the first, to rank 2 the second
            index = call % COPY_SLOTS * (ranks - 1) + {0: 0, 2: 1}[to]
            flag = (1 + to) * base + 4 * rank * exchange.MAX_CTAS
            at = (1 + to) * base + header_bytes(ranks) + index * slot_bytes
            written += [(at, 4096, 99, 7), (7, flag, call, 0)]
        assert log == written
        log.clear()
    assert memory_bytes(2, 1 << 20, COPY_SLOTS) - header_bytes(2) == 4 << 20
