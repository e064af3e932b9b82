"""The append kernel itself, made to note on which SMs its CTAs run.

A few instructions are put into its PTX: every CTA adds one to the count of its SM, at the address
that is passed as `positions` (which a call without positions does not read). Compilation, grid and
launch are the ordinary path over fresh kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from smkern.kernels.append_launch import POINTERS, AppendKernels
from smkern.ops.append.call import Call
from smkern.ops.append.operators import APPEND
from smkern.tuning.append import AppendConfig, Budget
from tests.gpu.append_support import Made, problem
from tests.gpu.attention.smid_trace import _PTX_LINES

TRACE_WORDS = 1024


def traced_ptx(ptx: str, name: str) -> str:
    """The kernel's PTX, noting its CTAs' SMs. Needs no GPU."""
    entry = ptx.index(f".entry {name}(")
    parameters = re.findall(r"\.param \.u64 \.ptr[^\n]*?(\w+_param_\d+)", ptx[entry:])
    lines = _PTX_LINES.format(parameter=parameters[POINTERS.index("positions_ptr")], at=0)
    body = ptx.index("\n{\n", entry) + 3
    return ptx[:body] + lines + ptx[body:]


class TracedAppend:
    """The append of a call for a budget, its launches leaving counts of CTAs an SM."""

    def __init__(self, made: Made, config: AppendConfig, budget: Budget, capability: int) -> None:
        self.made = made
        self.out = torch.full_like(made[0][0], torch.nan)
        self.notes = torch.zeros(TRACE_WORDS, dtype=torch.int32, device="cuda")
        compile_triton = triton.compile

        def compile_traced(*args: Any, **options: Any) -> Any:
            kernel = compile_triton(*args, **options)
            ptx = traced_ptx(kernel.asm["ptx"], kernel.metadata.name)
            # the driver compiles PTX where a cubin is expected
            return SimpleNamespace(
                metadata=kernel.metadata, asm={**kernel.asm, "cubin": ptx.encode() + b"\0"}
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "compile", compile_traced)
            kernels = AppendKernels(capability)
            self._launch = kernels.prepare(problem(made), config, budget)
        args, options = made
        call = Call(*args, **options, out=self.out)
        values = [*APPEND.addresses(call), *APPEND.numbers(call)]
        values[POINTERS.index("positions_ptr")] = self.notes.data_ptr()
        self._values = values
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        self._launch(stream, *self._values)

    def smids(self) -> Counter[int]:
        """CTAs of the launches since the last call, by SM; the notes are wiped."""
        torch.cuda.synchronize()
        counts = self.notes.tolist()
        self.notes.zero_()
        torch.cuda.synchronize()
        return Counter({sm: count for sm, count in enumerate(counts) if count})
