"""What the disassembler tells about compiled kernels."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.cache import get_cache_manager

from smkern.kernels.compile import Artifact

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTION_BYTES = 16
SASS_FILE = "kernel.sass"
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def told(kernel: Artifact | bytes, folder: Path, option: str) -> str:
    """What is known of a kernel ("-res-usage"), or its instructions; `folder` is for its file."""
    if option == "-sass":
        return sass([kernel], folder)[0]
    file = folder / "kernel.cubin"
    file.write_bytes(_cubin(kernel))
    return _run("cuobjdump", option, file)


def sass(kernels: Iterable[Artifact | bytes], folder: Path) -> list[str]:
    """The instructions of each of these kernels, all of them for one device.

    They are kept in Triton's cache, as kernels are, by what they are read from: a run of the
    disassembler takes half a second, however little it reads.
    """
    cubins = [_cubin(kernel) for kernel in kernels]
    (device,) = {_device(cubin) for cubin in cubins}
    codes = [_instructions(cubin) for cubin in cubins]
    kept = [get_cache_manager(_key(device, code)) for code in codes]
    new = [i for i, each in enumerate(kept) if each.get_file(SASS_FILE) is None]
    if new:
        texts = _disassembled(device, [codes[i] for i in new], folder)
        for i, text in zip(new, texts, strict=True):
            kept[i].put(text, SASS_FILE)
    found = [Path(each.get_file(SASS_FILE) or "").read_text() for each in kept]
    assert [text.count("\n") + 1 for text in found] == [_count(code) for code in codes]
    return found


def _disassembled(device: str, codes: list[bytes], folder: Path) -> list[str]:
    """The instructions in each of these, without their files: to begin `cuobjdump -sass` takes
    half as long again."""
    file = folder / "kernels.bin"
    file.write_bytes(b"".join(codes))
    lines = re.findall(
        r"^ +/\*[0-9a-f]+\*/ .*$", _run("nvdisasm", "-b", device, file), re.MULTILINE
    )
    counts = [_count(code) for code in codes]
    assert len(lines) == sum(counts)
    ends = [*accumulate(counts)]
    return ["\n".join(lines[end - n : end]) for n, end in zip(counts, ends, strict=True)]


def _count(code: bytes) -> int:
    return len(code) // INSTRUCTION_BYTES


def _key(device: str, code: bytes) -> str:
    """What decides a kernel's instructions as text."""
    return sha256(_tool() + device.encode() + code).hexdigest()


@cache
def _tool() -> bytes:
    return sha256((TOOLS / "nvdisasm").read_bytes()).digest()


def _run(tool: str, *arguments: str | Path) -> str:
    command = [TOOLS / tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _cubin(kernel: Artifact | bytes) -> bytes:
    return kernel if isinstance(kernel, bytes) else kernel.cubin


def _device(cubin: bytes) -> str:
    """What a cubin is for, as the disassembler calls it: a byte of the flags in its ELF header,
    the second one since version 8 of the ABI (sm_100)."""
    capability = cubin[0x30 if cubin[8] < 8 else 0x31]
    return f"SM{capability}{'a' if capability >= 90 else ''}"


def _instructions(cubin: bytes) -> bytes:
    """What lies in the section `.text.<kernel>` of an ELF file."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, headers + i * size) for i in range(count)]
    first_name = sections[names][4]
    found = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", first_name + name)
    ]
    assert len(found) == 1
    return found[0]


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
    along = re.compile(r"(sizePerThread|threadsPerWarp|warpsPerCTA) = \[(?:\d+, )+(\d+)\]")
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


def waits_first(code: str) -> bool:
    """Whether the wait for the kernel before comes ahead of all accesses of memory, loads of
    parameters apart."""
    wait = re.search(r"ACQBULK|DEPBAR\.GDC", code)
    first = re.search(r"\b(LDG|STG|LDGSTS|UTMALDG)\b", code)
    return wait is not None and first is not None and wait.start() < first.start()
