"""The GEMM kernels themselves, made to note on which SMs their CTAs run.

The driver compiles the traced PTX, and the plan that launches it is the ordinary one, so grid,
shared memory and occupancy are those of the real launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from smkern.kernels import gemm_compile as compiling
from smkern.kernels.aot import ast_source
from smkern.kernels.driver import load_function
from smkern.kernels.gemm_frame import Frame
from smkern.kernels.gemm_launch import GemmPlan
from smkern.kernels.gemm_variants import Variant, variant_of
from smkern.tuning.config import STREAM_K, Budget, GemmConfig
from smkern.tuning.constraints import COUNTER_BYTES
from tests.gpu import gemm_support, swiglu_support
from tests.gpu.gemm_support import capability, precompile_all
from tests.gpu.smid_trace import Notes, traced_ptx

_notes = cache(Notes)


@cache
def _loaded(variant: Variant):
    source, options = ast_source(compiling.source_of(variant))
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

    launches, plans = 1, 0

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
        launch = self.plan.bind(a.stride(0), w.stride(0), out.stride(0), 0)
        launch(a.data_ptr(), w.data_ptr(), out.data_ptr(), 0, 0, self.room.data_ptr(), stream)

    def smids(self) -> Counter[int]:
        """CTAs of the last launch, by SM; the notes are wiped."""
        found = _notes().smids()
        assert sum(found.values()) == self.plan.num_ctas, "not every CTA ran, or one ran twice"
        return found

    def reset(self) -> None:
        self.x.out.fill_(float("nan"))
        torch.cuda.synchronize()


GEMM_CASE, SWIGLU_CASE = gemm_support.Case(1000, 1032, 1096), swiglu_support.Case(1000, 520, 1096)
GEMMS = [
    GemmConfig("tma", 64, 64, 64, 4, 4, ctas_per_sm=3),
    GemmConfig("tma", 64, 128, 64, 4, 3, ctas_per_sm=2, split=STREAM_K),
    GemmConfig("ws", 128, 128, 64, 8, 4),
    GemmConfig("pointer", 64, 64, 64, 4, 3, ctas_per_sm=2, split=3),
]
SWIGLUS = [
    GemmConfig("ws", 128, 256, 64, 8, 4),
    GemmConfig("ws", 64, 128, 64, 4, 3, ctas_per_sm=2, split=STREAM_K),
    GemmConfig("ws", 96, 128, 64, 4, 3, swap=True, ctas_per_sm=2),
    GemmConfig("tma", 64, 64, 64, 4, 4, ctas_per_sm=3),
    GemmConfig("pointer", 64, 64, 64, 4, 3, ctas_per_sm=2, split=3),
]


def name_of(config: GemmConfig) -> str:
    return f"{config.kernel}-{config.block_n}-{config.split}" + "-swap" * config.swap


def compile_ahead() -> None:
    """Compile in parallel what `RUNS` launch."""
    precompile_all((GEMM_CASE.problem, config) for config in GEMMS)
    precompile_all((SWIGLU_CASE.problem, config) for config in SWIGLUS)


traced_gemm = partial(Traced, gemm_support, GEMM_CASE)
RUNS: dict[str, Callable[[Budget], Any]] = {
    **{f"gemm-{name_of(x)}": partial(traced_gemm, x) for x in GEMMS},
    **{f"swiglu-{name_of(x)}": partial(Traced, swiglu_support, SWIGLU_CASE, x) for x in SWIGLUS},
}
"""A launch of a budget by name."""
