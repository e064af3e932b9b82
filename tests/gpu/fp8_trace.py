"""Launches of e4m3 kernels that leave counts of CTAs by SM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from smkern.device import Budget
from smkern.kernels.fp8.gemm_launch import ScaledGemmKernels
from smkern.kernels.fp8.rows_launch import QuantKernels
from smkern.ops.fp8.dispatch import bind_plan
from smkern.ops.fp8.quantize import QUANTIZE, Quantize
from smkern.ops.gemm.call import row_stride
from smkern.ops.reference import fp8
from smkern.tuning.config import STREAM_K, GemmConfig
from smkern.tuning.fp8_rows import choose
from tests.gpu.fp8_support import Case, check, operands, problem_for
from tests.gpu.gemm_support import capability
from tests.gpu.smid_trace import Notes
from tests.gpu.traced_calls import Traced

CONFIGS = {
    "two": GemmConfig("ws", 128, 128, 64, 8, 6, eager=True),
    "one": GemmConfig("ws", 64, 128, 64, 4, 4, ctas_per_sm=2, split=STREAM_K, eager=True),
    "swapped": GemmConfig("ws", 64, 64, 64, 4, 3, True, ctas_per_sm=3, eager=True),
    "pointer": GemmConfig("pointer", 64, 64, 64, 8, 3),
}


class TracedProduct(Traced):
    """A product's launch by a configuration in a budget."""

    def __init__(self, config: GemmConfig, budget: Budget) -> None:
        self.case = Case(1000, 1032, 1152)
        self.x, self.notes = operands(self.case), Notes()
        problem, call = problem_for(self.case, self.x)
        with self.notes.compiling():
            plan = ScaledGemmKernels(capability(), 0).prepare(problem, config, budget)
        bound = bind_plan(plan, call, self.x.w, row_stride(self.x.out), 0)
        assert bound.launch is not None
        run = bound.launch
        self._launch = lambda stream, *given: run(*given, stream)
        size = max(plan.workspace_bytes, 1 << 16)
        self._room = torch.zeros(size, dtype=torch.uint8, device="cuda")
        x = self.x
        given = (x.a, x.w, x.a_scale, x.w_scale, x.out, None, None, self._room)
        self._given = tuple(0 if y is None else y.data_ptr() for y in given)
        torch.cuda.synchronize()

    def reset(self) -> None:
        self.x.out.fill_(torch.nan)
        torch.cuda.synchronize()

    def check(self) -> None:
        torch.cuda.synchronize()
        check(self.case, self.x)


class TracedQuantize(Traced):
    """Rows to e4m3."""

    def __init__(self, budget: Budget) -> None:
        self.x = torch.randn(3000, 4096, device="cuda").bfloat16()
        out = torch.empty(3000, 4096, dtype=torch.float8_e4m3fn, device="cuda")
        self.call, self.notes = (
            Quantize(self.x, "block", out, out.new_empty(3000, 32).float()),
            Notes(),
        )
        problem = QUANTIZE.problem(self.call, True)
        assert problem is not None
        with self.notes.compiling():
            run = QuantKernels(capability()).prepare(problem, choose(problem, budget), budget)
        self._launch, self._given = run, (*QUANTIZE.addresses(self.call), 512, 512, 32, 1, 3000)
        torch.cuda.synchronize()

    def reset(self) -> None:
        self.call.out_scale.fill_(torch.nan)
        torch.cuda.synchronize()

    def check(self) -> None:
        torch.cuda.synchronize()
        q, scale = fp8.quantize(self.x.cpu(), "block")  # torch divides otherwise on a GPU
        assert torch.equal(self.call.out_scale.cpu(), scale)
        assert torch.equal(self.call.out.cpu().float(), q.float())


RUNS: dict[str, Callable[[Budget], Any]] = {
    **{f"fp8-{name}": partial(TracedProduct, config) for name, config in CONFIGS.items()},
    "fp8-quantize": TracedQuantize,
}
"""A launch of a budget by name."""
