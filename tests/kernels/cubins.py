"""What the disassembler tells about compiled kernels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
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


def layouts_summed(monkeypatch: pytest.MonkeyPatch, shape: str) -> set[Any]:
    """How what is compiled from now on deals rows to lanes where it sums them.

    Args:
        shape: A pattern of the summed fp32 tensors' shape, such as "[0-9x]+".
    """
    layouts: set[Any] = set()
    compile_triton = triton.compile
    along = re.compile(r"(sizePerThread|threadsPerWarp|warpsPerCTA) = \[\d+, (\d+)\]")
    summed = re.compile(rf'"tt\.reduce".*?\}}\) : \(tensor<{shape}xf32, (#\w+)>\)', re.DOTALL)

    def spied(*args: Any, **options: Any) -> Any:
        kernel = compile_triton(*args, **options)
        text = kernel.asm["ttgir"]
        named = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.MULTILINE))
        found = summed.findall(text)
        assert found
        layouts.update(tuple(along.findall(named[x])) for x in found)
        return kernel

    monkeypatch.setattr(triton, "compile", spied)
    return layouts
