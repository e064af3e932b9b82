"""The attention kernels themselves, made to note on which SMs their CTAs run.

Every CTA adds one to the count of its SM, far behind everything else in the workspace. For the CUDA
kernels a line is put into a copy of `csrc/`, for Triton's a few instructions into the PTX. The rest
(compilation, grid, shared memory, launch) is the ordinary path over fresh kernels.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from smkern.kernels import cuda_source
from smkern.kernels.attention.args import AttentionArguments, WorkspaceLayout
from smkern.kernels.attention.items import PlanLayout
from smkern.kernels.attention.triton_compile import POINTERS
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget
from tests.gpu.attention.cases import Step

TRACE_AT = 1 << 23
"""Byte of the workspace where the counts begin; what a launch needs ends before it."""
TRACE_WORDS = 1024

_CUDA_LINE = """
  if (threadIdx.x == 0) {{
    unsigned trace_sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(trace_sm));
    atomicAdd((int*)((char*)p.{pointer} + {at}) + trace_sm, 1);
  }}
"""
_KERNELS = {"attention_decode": "workspace", "attention_prefill": "workspace",
            "attention_plan": "counters"}  # fmt: skip
_PTX_LINES = """{{
	.reg .pred %trace_p0;
	.reg .b32 %trace_r<2>;
	.reg .b64 %trace_d<2>;
	mov.u32 %trace_r0, %tid.x;
	setp.eq.u32 %trace_p0, %trace_r0, 0;
	mov.u32 %trace_r1, %smid;
	ld.param.u64 %trace_d0, [{parameter}];
	cvta.to.global.u64 %trace_d0, %trace_d0;
	mul.wide.u32 %trace_d1, %trace_r1, 4;
	add.s64 %trace_d0, %trace_d0, %trace_d1;
	@%trace_p0 red.global.add.u32 [%trace_d0+{at}], 1;
}}
"""


def traced_sources(folder: Path) -> Path:
    """A copy of `csrc/` in `folder` whose attention kernels note their SMs."""
    copy = folder / "csrc"
    shutil.copytree(cuda_source.source_folder(), copy)
    for name, pointer in _KERNELS.items():
        path = copy / f"{name}.cu"
        if not path.is_file():
            continue
        line = _CUDA_LINE.format(pointer=pointer, at=TRACE_AT).replace("\\", r"\\")
        # the kernel takes one struct, p
        text, count = re.subn(
            rf"(\b{name}\([^{{;]*\bp\b[^{{;]*\)\s*\{{)", r"\1" + line, path.read_text()
        )
        assert count == 1, f"{name}.cu: {count} places that look like the kernel's beginning"
        path.write_text(text)
    return copy


def traced_ptx(ptx: str, name: str) -> str:
    """A Triton attention kernel's PTX that notes its CTAs' SMs. Needs no GPU."""
    entry = ptx.index(f".entry {name}(")
    parameters = re.findall(r"\.param \.u64 \.ptr[^\n]*?(\w+_param_\d+)", ptx[entry:])
    lines = _PTX_LINES.format(parameter=parameters[POINTERS.index("counters")], at=TRACE_AT)
    body = ptx.index("\n{\n", entry) + 3
    return ptx[:body] + lines + ptx[body:]


class TracedKernels:
    """Kernels of the current device that note their SMs.

    Only what is loaded through here is changed: others' kernels must not write behind their room.
    """

    def __init__(self, folder: Path) -> None:
        from smkern.kernels.attention.launch import AttentionKernels

        major, minor = torch.cuda.get_device_capability()
        self._sources = traced_sources(folder)
        self._kernels: Any = AttentionKernels(torch.cuda.current_device(), 10 * major + minor)

    def plan(self, shape: AttentionShape, budget: Budget) -> Any:
        with self._traced():
            return self._kernels.plan(shape, budget)

    def prepare(self, problem: AttentionProblem, config: AttentionConfig, budget: Budget) -> Any:
        with self._traced():
            return self._kernels.prepare(problem, config, budget)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        compile_triton = triton.compile

        def compile_traced(*args: Any, **options: Any) -> Any:
            kernel = compile_triton(*args, **options)
            ptx = traced_ptx(kernel.asm["ptx"], kernel.metadata.name)
            # the driver compiles PTX where a cubin is expected
            return SimpleNamespace(
                metadata=kernel.metadata, asm={**kernel.asm, "cubin": ptx.encode() + b"\0"}
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_source, "source_folder", lambda: self._sources)
            patch.setattr(triton, "compile", compile_traced)
            yield


@dataclass(slots=True)
class Traced:
    """Plan and attention of a step for a budget, their launches leaving counts of CTAs an SM."""

    step: Step
    plan: Any
    attention: Any
    arguments: AttentionArguments
    buffer: Tensor
    workspace: Tensor

    @classmethod
    def of(
        cls, kernels: TracedKernels, step: Step, config: AttentionConfig, budget: Budget
    ) -> Traced:
        """Compile, load and bind both for a step's tensors."""
        problem = step.case.problem
        shape = problem.shape
        assert WorkspaceLayout.of(shape).num_bytes <= TRACE_AT, "the trace lies in the partials"
        buffer = torch.zeros(PlanLayout.of(shape).words, dtype=torch.int32, device="cuda")
        workspace = torch.full((TRACE_AT + 4 * TRACE_WORDS,), 255, dtype=torch.uint8, device="cuda")
        made = cls(
            step, kernels.plan(shape, budget), kernels.prepare(problem, config, budget),
            arguments_of(step, problem, shape, buffer, workspace), buffer, workspace,
        )  # fmt: skip
        made.wipe()
        return made

    @property
    def notes(self) -> Tensor:
        """[SM] int32: CTAs that ran there."""
        return self.workspace[TRACE_AT:].view(torch.int32)

    def wipe(self) -> None:
        torch.cuda.synchronize()
        self.notes.zero_()
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        """Plan, then attention, on a raw stream."""
        step = self.step
        queries = 0 if step.cu_q_lens is None else step.cu_q_lens.data_ptr()
        self.plan(
            step.kv_lens.data_ptr(), queries, self.buffer.data_ptr(), self.workspace.data_ptr(),
            stream,
        )  # fmt: skip
        self.attention(self.arguments.sizes)(stream, *self.arguments.addresses)

    def smids(self) -> Counter[int]:
        """CTAs of the launches since the last call, by SM; the notes are wiped."""
        torch.cuda.synchronize()
        notes = self.notes.tolist()
        self.wipe()
        return Counter({sm: count for sm, count in enumerate(notes) if count})


def arguments_of(
    step: Step, problem: AttentionProblem, shape: AttentionShape, plan: Tensor, workspace: Tensor
) -> AttentionArguments:
    """What a launch of a step is given; scales of fp8 caches by value only."""
    case = step.case
    k, v = step.k_cache, step.v_cache
    return AttentionArguments(
        q=step.q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=step.out.data_ptr(),
        lse=step.lse.data_ptr(), page_table=step.page_table.data_ptr(),
        page_indptr=0 if step.page_indptr is None else step.page_indptr.data_ptr(),
        sinks=0 if step.sinks is None else step.sinks.data_ptr(), k_scale_ptr=0, v_scale_ptr=0,
        plan=plan.data_ptr(), workspace=workspace.data_ptr(),
        q_strides=step.q.stride()[:2], out_strides=step.out.stride()[:2],
        k_strides=k.stride()[:3], v_strides=v.stride()[:3],
        table_stride=step.page_table.stride(0), table_len=step.page_table.shape[-1],
        num_pages=k.shape[0], num_tokens=step.q.shape[0],
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap or 0.0, k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
