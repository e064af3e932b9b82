"""The attention kernels themselves, made to note on which SMs their CTAs run.

The counts lie in the workspace, far behind everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from smkern.kernels.attention.args import AttentionArguments, WorkspaceLayout
from smkern.kernels.attention.items import PlanLayout
from smkern.kernels.attention.launch import AttentionKernels
from smkern.tuning.attention.constraints import default_config
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget
from tests.gpu.attention.cases import Case, Step, make_step
from tests.gpu.attention.support import BACKENDS
from tests.gpu.attention.truth import check
from tests.gpu.smid_trace import TRACE_WORDS, Notes, traced_sources
from tests.gpu.traced_calls import Traced

TRACE_AT = 1 << 23
"""Byte of the workspace where the counts begin; what a launch needs ends before it."""
_KERNELS = {"attention_decode": "workspace", "attention_prefill": "workspace",
            "attention_plan": "counters"}  # fmt: skip


class TracedKernels:
    """Kernels of the current device that note their SMs, and the workspace of their launches.

    Only what is loaded through here is changed: others' kernels must not write behind their room.
    """

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        size = TRACE_AT + 4 * TRACE_WORDS
        self.workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.notes = Notes(self.workspace[TRACE_AT:].view(torch.int32))
        self._kernels: Any = AttentionKernels(10 * major + minor)

    def plan(self, shape: AttentionShape, budget: Budget) -> Any:
        with self._traced():
            return self._kernels.plan(shape, budget)

    def prepare(self, problem: AttentionProblem, config: AttentionConfig, budget: Budget) -> Any:
        with self._traced():
            return self._kernels.prepare(problem, config, budget)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        with traced_sources(_KERNELS, TRACE_AT), self.notes.compiling():
            yield


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


@cache
def _traced_kernels() -> TracedKernels:
    return TracedKernels()


class TracedAttention(Traced):
    """Plan and attention of a step, by a kernel's default configuration in a budget."""

    plans = 1

    def __init__(self, case: Case, kernel: str, budget: Budget) -> None:
        problem, shape = case.problem, case.shape
        assert WorkspaceLayout.of(shape).num_bytes <= TRACE_AT, "the trace lies in the partials"
        # Triton's paths are a kernel each
        self.launches = 2 if kernel == "triton" and shape.has_prefill else 1
        config = default_config(problem, kernel)
        if budget.confined == "grid":
            config = replace(config, ctas_per_sm=1)
        self._step, kernels = make_step(case), _traced_kernels()
        self._buffer = torch.zeros(PlanLayout.of(shape).words, dtype=torch.int32, device="cuda")
        self._workspace, self.notes = kernels.workspace.fill_(255), kernels.notes
        self._plan = kernels.plan(shape, budget)
        self._attention = kernels.prepare(problem, config, budget)
        self._arguments = arguments_of(self._step, problem, shape, self._buffer, self._workspace)
        self.notes.wipe()
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        """Plan, then attention, on a raw stream."""
        step = self._step
        queries = 0 if step.cu_q_lens is None else step.cu_q_lens.data_ptr()
        self._plan(
            step.kv_lens.data_ptr(), queries, self._buffer.data_ptr(),
            self._workspace.data_ptr(), stream,
        )  # fmt: skip
        self._attention(self._arguments.sizes)(stream, *self._arguments.addresses)

    def reset(self) -> None:
        self._step.poison_outputs()
        torch.cuda.synchronize()

    def check(self) -> None:
        check(self._step)


CASES = {
    "decode": Case(kv_lens=(3000, 1, 700, 2000, 1500, 900)),
    "mixed": Case(kv_lens=(900, 1, 700, 300, 1500, 64), q_lens=(300, 1, 2, 300, 1, 8)),
}
RUNS: dict[str, Callable[[Budget], Any]] = {
    f"attention-{name}-{kernel}": partial(TracedAttention, case, kernel)
    for name, case in CASES.items()
    for kernel in BACKENDS
}
"""A launch of a budget by name."""
