"""CTAs of e4m3 kernels stay on their SMs: seen by %smid, by mask and by grid, also in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
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
from tests.gpu.confinement import check_capped, check_masked, check_replayed
from tests.gpu.fp8_support import Case, check, operands, problem_for
from tests.gpu.gemm_support import capability
from tests.gpu.sides import at_most
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
            plan = ScaledGemmKernels(capability()).prepare(problem, config, budget)
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
    **{name: partial(TracedProduct, config) for name, config in CONFIGS.items()},
    "quantize": TracedQuantize,
}
EACH = pytest.mark.parametrize("traced", RUNS.values(), ids=RUNS)


@EACH
def test_the_mask_confines_every_cta(ladder, traced):
    for partition in ladder.split(decode=16):
        check_masked(traced(Budget(partition.num_sms, "mask", partition.clusters)), partition)


@EACH
def test_the_mask_confines_a_replayed_graph(ladder, traced):
    partition = ladder.split(decode=16).decode
    check_replayed(traced(Budget(16, "mask", partition.clusters)), partition)


@EACH
@pytest.mark.parametrize("num_sms", [1, 24])
def test_the_grid_caps_the_sms(traced, num_sms):
    num_sms = at_most(num_sms)
    check_capped(traced(Budget(num_sms, "grid")), num_sms)
