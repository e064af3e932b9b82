"""Triton kernels of small operators, made to note on which SMs their CTAs run.

A few instructions are put into their PTX: every CTA adds one to the count of its SM, at an address
that is written into the code. The rest is the ordinary path over fresh kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

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


def traced_ptx(ptx: str, name: str, address: int) -> str:
    """The kernel's PTX, noting its CTAs' SMs at a device address. Needs no GPU."""
    entry = ptx.index(f".entry {name}(")
    body = ptx.index("\n{\n", entry) + 3
    return ptx[:body] + _PTX_LINES.format(address=address) + ptx[body:]


class Notes:
    """Counts of CTAs an SM."""

    def __init__(self) -> None:
        self.counts = torch.zeros(TRACE_WORDS, dtype=torch.int32, device="cuda")

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

    def smids(self) -> Counter[int]:
        """CTAs of the launches since the last call, by SM; the notes are wiped."""
        torch.cuda.synchronize()
        found = self.counts.tolist()
        self.counts.zero_()
        torch.cuda.synchronize()
        return Counter({sm: count for sm, count in enumerate(found) if count})
