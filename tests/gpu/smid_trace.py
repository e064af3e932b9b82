"""Kernels made to note on which SMs their CTAs run: each adds one to the count of its SM.

Into a Triton kernel's PTX go a few instructions, with the counts' address written into the code;
into a CUDA kernel, in a copy of `csrc/`, goes a line. The rest (compilation, grid, shared memory,
launch) is the ordinary path over fresh kernels.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from smkern.kernels import cuda_source

TRACE_WORDS = 1024

_PTX_LINES = """{{
	.reg .pred %trace_p0;
	.reg .b32 %trace_r<2>;
	.reg .b64 %trace_d<2>;
	mov.u32 %trace_r0, %tid.x;
	setp.eq.u32 %trace_p0, %trace_r0, 0;
	mov.u32 %trace_r1, %smid;
	mov.u64 %trace_d0, {address};
	mul.wide.u32 %trace_d1, %trace_r1, 4;
	add.s64 %trace_d0, %trace_d0, %trace_d1;
	@%trace_p0 red.global.add.u32 [%trace_d0], 1;
}}
"""
_CUDA_LINE = """
  if (threadIdx.x == 0) {{
    unsigned trace_sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(trace_sm));
    atomicAdd((int*)((char*)p.{pointer} + {at}) + trace_sm, 1);
  }}
"""


@contextmanager
def traced_sources(pointers: Mapping[str, str], at: int) -> Iterator[None]:
    """What is compiled meanwhile from `csrc/` notes its SMs.

    Args:
        pointers: Kernel to the member of its struct p that points to memory for the counts.
        at: Byte there where the counts begin.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        copy = Path(folder) / "csrc"
        shutil.copytree(cuda_source.source_folder(), copy)
        for name, pointer in pointers.items():
            path = copy / f"{name}.cu"
            line = _CUDA_LINE.format(pointer=pointer, at=at)
            text, count = re.subn(
                rf"(\b{name}\([^{{;]*\bp\b[^{{;]*\)\s*\{{)",
                lambda match, line=line: match[1] + line,
                path.read_text(),
            )
            assert count == 1, f"{name}.cu: {count} places that look like the kernel's beginning"
            path.write_text(text)
        patch.setattr(cuda_source, "source_folder", lambda: copy)
        yield


def traced_ptx(ptx: str, name: str, address: int) -> str:
    """The kernel's PTX, noting its CTAs' SMs at a device address. Needs no GPU."""
    entry = ptx.index(f".entry {name}(")
    body = ptx.index("\n{\n", entry) + 3
    return ptx[:body] + _PTX_LINES.format(address=address) + ptx[body:]


class Notes:
    """Counts of CTAs by SM.

    Args:
        counts: int32 memory for them. None: of its own.
    """

    def __init__(self, counts: Tensor | None = None) -> None:
        if counts is None:
            counts = torch.zeros(TRACE_WORDS, dtype=torch.int32, device="cuda")
        self.counts = counts

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is compiled (and loaded) meanwhile notes its SMs here."""
        compile_triton = triton.compile

        def compile_traced(*args: Any, **options: Any) -> Any:
            kernel = compile_triton(*args, **options)
            ptx = traced_ptx(kernel.asm["ptx"], kernel.metadata.name, self.counts.data_ptr())
            # the driver compiles PTX where a cubin is expected
            return SimpleNamespace(
                metadata=kernel.metadata, asm={**kernel.asm, "cubin": ptx.encode() + b"\0"}
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "compile", compile_traced)
            yield

    def wipe(self) -> None:
        torch.cuda.synchronize()
        self.counts.zero_()
        torch.cuda.synchronize()

    def smids(self) -> Counter[int]:
        """CTAs of the launches since the last call, by SM; the notes are wiped."""
        torch.cuda.synchronize()
        found = self.counts.tolist()
        self.wipe()
        return Counter({sm: count for sm, count in enumerate(found) if count})
