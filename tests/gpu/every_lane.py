"""The attention kernels as racecheck can follow them: every lane arrives at the barriers of a warp.

Where a warp hands shared memory over, its lanes write, `__syncwarp()`, and one lane arrives at an
mbarrier, which orders all that came before (PTX, "causality order"). compute-sanitizer of CUDA 13
credits an arrival to its own lane, and reports what the other 31 wrote or read: half a million
times in `attention_decode`, never where each lane arrives. So in a copy of `csrc/` each lane does,
and what is reported there is a race.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from smkern.kernels import cuda_source

EXPECT = """asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                     ::"r"(full), "r"(kQueryBytes) : "memory");
      barrier_arrive(full);"""
CHANGES = {
    "attention_decode.cuh": (
        ("  if (lane == 0) barrier_arrive(", "  barrier_arrive("),
        ("&note.next[w]), 1)", "&note.next[w]), 32)"),
        ("&note.left), kCopies)", "&note.left), 32 * kCopies)"),
        ("&note.written), 4)", "&note.written), kTeamThreads)"),
    ),
    "attention_prefill_gather.cuh": (
        ("empty_keys + 8 * i, 8)", "empty_keys + 8 * i, 256)"),
        ("empty_values + 8 * i, 8)", "empty_values + 8 * i, 256)"),
        ("full_work + 8 * i, 1)", "full_work + 8 * i, 32)"),
        ("empty_work + 8 * i, kReaders)", "empty_work + 8 * i, 32 * kReaders)"),
        ("barrier_expect(full, kQueryBytes);", EXPECT),
        ("else if (lane == 0) {\n      barrier_arrive(full)", "else {\n      barrier_arrive(full)"),
    ),
    "attention_prefill_boxes.cuh": (
        ("if (!of_keys && lane == 0) barrier_arrive(", "if (!of_keys) barrier_arrive("),
    ),
    "attention_prefill_copy.cuh": (
        ("if (lane == 0) barrier_arrive(s.empty_work", "barrier_arrive(s.empty_work"),
    ),
    "attention_prefill.cuh": (
        ("if (lane == 0) barrier_arrive(empty + 8", "barrier_arrive(empty + 8"),
    ),
}  # fmt: skip
"""What is replaced, once in each file."""


def change(name: str, text: str) -> str:
    """A file of `csrc/` in which every lane arrives."""
    for old, new in CHANGES.get(name, ()):
        if text.count(old) != 1:
            raise ValueError(f"csrc/{name} has {text.count(old)} of {old!r}, not one: mend CHANGES")
        text = text.replace(old, new)
    return text


def let_every_lane_arrive(folder: Path) -> None:
    """Have this process compile a copy of `csrc/` in `folder` in which every lane arrives."""
    shutil.copytree(cuda_source.source_folder(), folder)
    for name in CHANGES:
        path = folder / name
        path.write_text(change(name, path.read_text()))
    cuda_source.source_folder = lambda: folder
