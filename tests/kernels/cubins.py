"""What the disassembler tells about compiled kernels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

from smkern.kernels.compile import Artifact

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def told(kernel: Artifact | bytes, folder: Path, *options: str) -> str:
    """The disassembler's answer about a kernel; `folder` is for its file."""
    file = folder / "kernel.cubin"
    file.write_bytes(kernel if isinstance(kernel, bytes) else kernel.cubin)
    command = [CUOBJDUMP, *options, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sizes(kernel: Artifact | bytes, folder: Path) -> tuple[int, int, int]:
    """Registers of a thread, bytes that did not fit them, static shared memory."""
    found = USAGE.search(told(kernel, folder, "-res-usage"))
    assert found
    return int(found[1]), int(found[2]), int(found[3])


def usage(kernel: Artifact | bytes, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit them."""
    return sizes(kernel, folder)[:2]
