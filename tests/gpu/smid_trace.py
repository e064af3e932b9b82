"""The GEMM kernels themselves, made to note where each CTA runs.

A few instructions are put in front of a compiled kernel's PTX: every CTA stores its %smid behind
the counters it was given anyway. The driver compiles the result, and the plan that launches it is
the ordinary one, so grid, shared memory and occupancy are those of the real launch.
"""

from __future__ import annotations

import re
from functools import cache, partial

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from smkern.kernels import gemm_compile as compiling
from smkern.kernels.driver import load_function
from smkern.kernels.gemm_frame import Frame
from smkern.kernels.gemm_launch import GemmPlan
from smkern.kernels.gemm_variants import Variant, variant_of
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.constraints import COUNTER_BYTES

TRACE_BYTES = 32768
"""Where the trace begins in the counters' room; small tests use a few counters at its head."""

_PROLOGUE = """{{
	.reg .b32 %trace_r<3>;
	.reg .b64 %trace_d<3>;
	mov.u32 %trace_r0, %smid;
	add.u32 %trace_r0, %trace_r0, 1;
	mov.u32 %trace_r1, %ctaid.x;
	ld.param.u64 %trace_d0, [{parameter}];
	cvta.to.global.u64 %trace_d0, %trace_d0;
	mul.wide.u32 %trace_d1, %trace_r1, 4;
	add.u64 %trace_d0, %trace_d0, %trace_d1;
	st.global.u32 [%trace_d0+{offset}], %trace_r0;
}}
"""


def traced_ptx(variant: Variant) -> tuple[str, str]:
    """A variant's PTX with the trace in front, and the kernel's name. Needs no GPU."""
    make = compiling._ws_source if variant.kernel == "ws" else compiling._triton_source
    source, options = make(variant)
    target = GPUTarget("cuda", variant.capability, 32)
    kernel = triton.compile(source, target=target, options=options)
    ptx = kernel.asm["ptx"]
    entry = ptx.index(f".entry {kernel.metadata.name}(")
    pointers = re.findall(r"\.param \.u64 \.ptr[^\n]*?(\w+_param_\d+)", ptx[entry:])
    parameter = pointers[4 if variant.uses_tma else 6]
    body = ptx.index("\n{\n", entry) + 3
    prologue = _PROLOGUE.format(parameter=parameter, offset=TRACE_BYTES)
    return ptx[:body] + prologue + ptx[body:], kernel.metadata.name


@cache
def _loaded(variant: Variant):
    ptx, name = traced_ptx(variant)
    artifact = compiling.compile_variant(variant)
    return artifact, load_function(ptx.encode() + b"\0", name, artifact.shared_bytes)


class Traced:
    """A plan whose launches leave the SM ids of their CTAs."""

    def __init__(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> None:
        major, minor = torch.cuda.get_device_capability()
        variant = variant_of(problem, config, 10 * major + minor)
        self.plan = GemmPlan(
            problem, config, budget, variant, partial(Frame, variant, *_loaded(variant))
        )
        size = max(self.plan.workspace_bytes, COUNTER_BYTES)
        self.room = torch.zeros(size, dtype=torch.uint8, device="cuda")

    @property
    def notes(self) -> Tensor:
        """[num_ctas] int32: SM id plus 1; 0 where a CTA did not run."""
        words = self.room[TRACE_BYTES:COUNTER_BYTES].view(torch.int32)
        return words[: self.plan.num_ctas]

    def launch(self, a: Tensor, w: Tensor, out: Tensor, stream: int) -> None:
        self.plan.launch(
            a.data_ptr(), w.data_ptr(), out.data_ptr(), 0, 0,
            a.stride(0), w.stride(0), out.stride(0), 0, self.room.data_ptr(), stream,
        )  # fmt: skip

    def smids(self) -> list[int]:
        """SM of every CTA of the last launch, in CTA order, and the notes are wiped."""
        torch.cuda.synchronize()
        found = [note - 1 for note in self.notes.tolist()]
        assert min(found) >= 0, "a CTA did not run"
        self.notes.zero_()
        torch.cuda.synchronize()
        return found
