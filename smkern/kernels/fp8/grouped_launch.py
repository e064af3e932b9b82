"""From a grouped GEMM of e4m3 to its launch."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.kernels.aot import KernelSet, KernelSource, Launch, compile_source
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import OVERLAP_FROM, may_overlap
from smkern.tuning.bucket_table import power_of_two
from smkern.tuning.fp8_grouped import (
    BLOCK_K,
    CONFIGS,
    Budget,
    ScaledGroupedConfig,
    ScaledGroupedProblem,
    num_ctas,
)

SIGNATURE = (
    {"a_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv", "a_scale": "*fp32", "w_scale": "*fp32"}
    | {"offsets_ptr": "*i32", "out_ptr": "*x"}
    | dict.fromkeys(("a_stride", "w_stride", "expert_stride", "out_stride"), "i64")
    | dict.fromkeys(("a_step", "a_block_step", "w_step", "w_expert_step"), "i32")
    | dict.fromkeys(("rows", "num_experts", "n", "half", "k", "tiles_n"), "i32")
)
"""Run-time parameters of `fp8_grouped_pointer`."""


@dataclass(frozen=True, slots=True, order=True)
class ScaledGroupedVariant:
    """One compiled kernel; `experts` is a power of two, at least 32."""

    out_dtype: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swiglu: bool
    blocks: bool
    experts: int
    unit: int
    capability: int

    def compile(self) -> Artifact:
        """Compile it into the user's cache (or take it from there). Needs no GPU."""
        from smkern.kernels.fp8.grouped_triton import fp8_grouped_pointer

        kinds = SIGNATURE.items()
        return compile_source(
            KernelSource(
                fn=fp8_grouped_pointer,
                signature={k: f"*{self.out_dtype}" if v == "*x" else v for k, v in kinds},
                constants={
                    "BLOCK_M": self.block_m,
                    "BLOCK_N": self.block_n,
                    "BLOCK_K": BLOCK_K,
                    "STAGES": self.num_stages,
                    "GLU": self.swiglu,
                    "BLOCKS": self.blocks,
                    "UNIT": self.unit,
                    "EXPERTS": self.experts,
                    "PDL": self.capability >= OVERLAP_FROM,
                },
                aligned=("a_ptr", "w_ptr") if self.unit == 16 else (),
                num_warps=self.num_warps,
                capability=self.capability,
                num_stages=self.num_stages,
            )
        )


class ScaledGroupedKernels:
    """The grouped GEMMs of e4m3 of one device; each is compiled and loaded once, and counted.

    Args:
        capability: Compute capability, such as 90.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self._set = KernelSet()

    def variants(self, problem: ScaledGroupedProblem) -> tuple[ScaledGroupedVariant, ...]:
        """All kernels for a problem's kind, for any number of rows."""
        return tuple(self._variant(problem, config) for config in CONFIGS)

    def _variant(
        self, problem: ScaledGroupedProblem, config: ScaledGroupedConfig
    ) -> ScaledGroupedVariant:
        return ScaledGroupedVariant(
            problem.out_dtype, config.block_m, config.block_n, config.num_warps, config.num_stages,
            problem.swiglu, problem.blocks, max(32, power_of_two(problem.num_experts)),
            16 if problem.aligned else 1, self.capability,
        )  # fmt: skip

    def is_loaded(self, problem: ScaledGroupedProblem) -> bool:
        """Whether `prepare` would compile and load nothing."""
        return all(self._set.is_loaded(x) for x in self.variants(problem))

    def prepare(
        self, problem: ScaledGroupedProblem, config: ScaledGroupedConfig, budget: Budget
    ) -> Launch:
        """launch(stream, *parameters); loads all kernels of the kind on first use."""
        for variant in self.variants(problem):
            self._set.load(variant, variant.compile)
        overlap = may_overlap(config.pdl, budget, self.capability)
        ctas = num_ctas(problem, config, budget)
        return self._set.bind(self._variant(problem, config), "6Q14q", ctas, overlap=overlap)
