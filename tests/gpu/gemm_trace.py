"""The GEMM kernels themselves, made to note on which SMs their CTAs run.

The driver compiles the traced PTX, and the plan that launches it is the ordinary one, so grid,
shared memory and occupancy are those of the real launch.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from smkern.kernels import gemm_compile as compiling
from smkern.kernels.driver import load_function
from smkern.kernels.gemm_frame import Frame
from smkern.kernels.gemm_launch import GemmPlan
from smkern.kernels.gemm_variants import Variant, variant_of
from smkern.tuning.config import Budget, GemmConfig
from smkern.tuning.constraints import COUNTER_BYTES
from tests.gpu.gemm_support import capability
from tests.gpu.smid_trace import Notes, traced_ptx

_notes = cache(Notes)


@cache
def _loaded(variant: Variant):
    make = compiling._ws_source if variant.kernel == "ws" else compiling._triton_source
    source, options = make(variant)
    target = GPUTarget("cuda", variant.capability, 32)
    kernel = triton.compile(source, target=target, options=options)
    name = kernel.metadata.name
    ptx = traced_ptx(kernel.asm["ptx"], name, _notes().counts.data_ptr())
    artifact = compiling.compile_variant(variant)
    return artifact, load_function(ptx.encode() + b"\0", name, artifact.shared_bytes)


class Traced:
    """A case's product, whose launches leave the SM ids of their CTAs.

    Args:
        support: `gemm_support` or `swiglu_support`, whose `operands` and `check` are the case's.
        case: The case.
        config, budget: Of the launch.
    """

    def __init__(self, support: Any, case: Any, config: GemmConfig, budget: Budget) -> None:
        variant = variant_of(case.problem, config, capability())
        self.plan = GemmPlan(
            case.problem, config, budget, variant, partial(Frame, variant, *_loaded(variant))
        )
        size = max(self.plan.workspace_bytes, COUNTER_BYTES)
        self.room = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.x = support.operands(case)
        self.check = partial(support.check, case, self.x)
        _notes().wipe()
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        a, w, out = self.x.a, self.x.w, self.x.out
        self.plan.launch(
            a.data_ptr(), w.data_ptr(), out.data_ptr(), 0, 0,
            a.stride(0), w.stride(0), out.stride(0), 0, self.room.data_ptr(), stream,
        )  # fmt: skip

    def smids(self) -> Counter[int]:
        """CTAs of the last launch, by SM; the notes are wiped."""
        found = _notes().smids()
        assert sum(found.values()) == self.plan.num_ctas, "not every CTA ran, or one ran twice"
        return found

    def reset(self) -> None:
        self.x.out.fill_(float("nan"))
        torch.cuda.synchronize()
