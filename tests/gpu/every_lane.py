"""The kernels as racecheck can follow them: every lane arrives at the barriers of a warp.

Where a warp hands shared memory over, its lanes write, `__syncwarp()`, and one lane arrives at an
mbarrier, which orders all that came before (PTX, "causality order"). compute-sanitizer of CUDA 13
credits an arrival to its own lane, and reports what the other 31 wrote or read: half a million
times in `attention_decode`, never where each lane arrives. So in a copy of the checkout each lane
does, and what is reported there is a race.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = "smkern", "csrc", "tests"
EXPECT = """asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                     ::"r"(full), "r"(kQueryBytes) : "memory");
      barrier_arrive(full);"""
ELECTED, ARRIVE = "with arch.elect_one():\n            ", "arch.mbarrier_arrive(spent"
CHANGES = {
    "csrc/attention_decode.cuh": (
        ("  if (lane == 0) barrier_arrive(", "  barrier_arrive("),
        ("&note.next[w]), 1)", "&note.next[w]), 32)"),
        ("&note.left), kCopies)", "&note.left), 32 * kCopies)"),
        ("&note.written), 4)", "&note.written), kTeamThreads)"),
    ),
    "csrc/attention_prefill_gather.cuh": (
        ("empty_keys + 8 * i, 8)", "empty_keys + 8 * i, 256)"),
        ("empty_values + 8 * i, 8)", "empty_values + 8 * i, 256)"),
        ("full_work + 8 * i, 1)", "full_work + 8 * i, 32)"),
        ("empty_work + 8 * i, kReaders)", "empty_work + 8 * i, 32 * kReaders)"),
        ("barrier_expect(full, kQueryBytes);", EXPECT),
        ("else if (lane == 0) {\n      barrier_arrive(full)", "else {\n      barrier_arrive(full)"),
    ),
    "csrc/attention_prefill_boxes.cuh": (
        ("if (!of_keys && lane == 0) barrier_arrive(", "if (!of_keys) barrier_arrive("),
    ),
    "csrc/attention_prefill_copy.cuh": (
        ("if (lane == 0) barrier_arrive(s.empty_work", "barrier_arrive(s.empty_work"),
    ),
    "csrc/attention_prefill.cuh": (
        ("if (lane == 0) barrier_arrive(empty + 8", "barrier_arrive(empty + 8"),
    ),
    "smkern/kernels/cute/fp8_gemm.py": (
        (ELECTED + ARRIVE, ARRIVE),
        ("(spent + i, 4 * self.parts)", "(spent + i, 128 * self.parts)"),
    ),
}  # fmt: skip
"""What is replaced, once in each file."""


def change(name: str, text: str) -> str:
    """A file in which every lane arrives."""
    for old, new in CHANGES[name]:
        if text.count(old) != 1:
            raise ValueError(f"{name} has {text.count(old)} of {old!r}, not one: mend CHANGES")
        text = text.replace(old, new)
    return text


def copy_checkout(folder: Path) -> None:
    """A copy of what the checks run, in which every lane arrives."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in CHANGES:
        path = folder / name
        path.write_text(change(name, path.read_text()))
