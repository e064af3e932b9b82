"""From a grouped GEMM of e4m3 to its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.kernels.aot import (
    FamilyKernels,
    KernelSource,
    Launch,
    LoadedKernel,
    Mapped,
    compile_source,
    matrices,
)
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import OVERLAP_FROM, may_overlap
from smkern.kernels.fp8.gemm_compile import PAIRS, UNIT, store_layout
from smkern.tuning import fp8
from smkern.tuning.bucket_table import power_of_two
from smkern.tuning.fp8_grouped import (
    BLOCK_K,
    Budget,
    ScaledGroupedProblem,
    configs_of,
    copy_registers,
    num_ctas,
)
from smkern.tuning.grouped import GroupedConfig

ADDRESSES = {"a_scale": "*fp32", "w_scale": "*fp32", "offsets_ptr": "*i32", "out_ptr": "*x"}
"""What both kernels are given behind the matrices; "*x": of the result's dtype."""
POINTER_NUMBERS = (
    dict.fromkeys(("a_stride", "w_stride", "expert_stride", "out_stride"), "i64")
    | dict.fromkeys(("a_step", "a_block_step", "w_step", "w_expert_step"), "i32")
    | dict.fromkeys(("rows", "num_experts", "n", "half", "k", "tiles_n"), "i32")
)
"""Run-time numbers of `fp8_grouped_pointer`."""
WS_NUMBERS = (
    "rows", "num_experts", "n", "expert_rows", "half_rows", "out_stride", "a_step", "a_block_step",
    "w_step", "w_expert_step", "tiles_n", "k_iters",
)  # fmt: skip
"""Run-time numbers of `fp8_grouped_ws`."""


@dataclass(frozen=True, slots=True, order=True)
class ScaledGroupedVariant:
    """One compiled kernel; `experts` is a power of two, at least 32."""

    config: GroupedConfig
    out_dtype: str
    swiglu: bool
    blocks: bool
    experts: int
    unit: int
    capability: int

    def compile(self) -> Artifact:
        """Compile it into the user's cache (or take it from there). Needs no GPU.

        Raises:
            DeviceError: the kernel needs more shared memory than a CTA may have.
        """
        make = _ws_source if self.config.kernel == "ws" else _pointer_source
        return compile_source(make(self))


def variant_of(
    problem: ScaledGroupedProblem, config: GroupedConfig, capability: int
) -> ScaledGroupedVariant:
    """The kernel for a problem and a configuration."""
    return ScaledGroupedVariant(
        config, problem.out_dtype, problem.swiglu, problem.blocks,
        max(32, power_of_two(problem.num_experts)), 16 if problem.aligned else 1, capability,
    )  # fmt: skip


def _addresses(variant: ScaledGroupedVariant) -> dict[str, str]:
    return {k: f"*{variant.out_dtype}" if v == "*x" else v for k, v in ADDRESSES.items()}


def _pointer_source(variant: ScaledGroupedVariant) -> KernelSource:
    from smkern.kernels.fp8.grouped_triton import fp8_grouped_pointer

    config = variant.config
    matrices = {"a_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv"}
    return KernelSource(
        fn=fp8_grouped_pointer,
        signature=matrices | _addresses(variant) | POINTER_NUMBERS,
        constants={
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": BLOCK_K,
            "STAGES": config.num_stages,
            "GLU": variant.swiglu,
            "BLOCKS": variant.blocks,
            "UNIT": variant.unit,
            "EXPERTS": variant.experts,
            "PDL": variant.capability >= OVERLAP_FROM,
        },
        aligned=("a_ptr", "w_ptr") if variant.unit == 16 else (),
        num_warps=config.num_warps,
        capability=variant.capability,
        num_stages=config.num_stages,
    )


def _ws_source(variant: ScaledGroupedVariant) -> KernelSource:
    from triton.experimental.gluon import language as gl

    from smkern.kernels.fp8.grouped_ws import fp8_grouped_ws

    config = variant.config
    signature = matrices(PAIRS, a=(config.block_m, fp8.STEP), w=(config.block_n, fp8.STEP))
    signature |= _addresses(variant) | dict.fromkeys(WS_NUMBERS, "i32")
    wide = variant.swiglu and not config.swap
    columns = config.block_m if config.swap else 64 if wide else config.block_n
    each, copying = variant.experts // 32, copy_registers(variant.experts)
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": fp8.STEP,
        "STAGES": config.num_stages,
        "PARTS": config.num_warps // 4,
        "BLOCKS": variant.blocks,
        "GLU": variant.swiglu,
        "SWAP": config.swap,
        "EXPERTS": variant.experts,
        # every warp holds all experts, so that its search is independent of other warps
        "COPY_LAYOUT": gl.BlockedLayout([each], [32], [1], [0]),
        "EXPERT_LAYOUT": gl.BlockedLayout([each], [32], [4], [0]),
        "MMA": gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32]
        ),
        "LAYOUT": store_layout(gl, columns, config.swap),
        "FLAT": gl.NVMMASharedLayout.get_default_for([64, 2 * fp8.STEP], gl.float8e4nv),
        "REGS": fp8.multiply_registers(config, copying),
        "COPY_REGS": copying,
    }
    # a partition has 4 warps, and the launch as many again for each part and the copying warp
    return KernelSource(
        fp8_grouped_ws, signature, constants, ("out_ptr",), 4, variant.capability,
        maxnreg=fp8.base_registers(config),
    )  # fmt: skip


class ScaledGroupedKernels(FamilyKernels[ScaledGroupedProblem]):
    """The grouped GEMMs of e4m3 of one device."""

    def variants(self, problem: ScaledGroupedProblem) -> tuple[ScaledGroupedVariant, ...]:
        wanted = configs_of(problem, self.capability)
        return tuple(variant_of(problem, config, self.capability) for config in wanted)

    def prepare(
        self, problem: ScaledGroupedProblem, config: GroupedConfig, budget: Budget
    ) -> Launch:
        """launch(stream, a, w, a_scale, w_scale, offsets, out); loads all kernels of the kind on
        first use."""
        self._load(problem)
        mine = variant_of(problem, config, self.capability)
        loaded = self._set.load(mine, mine.compile)
        overlap = may_overlap(config.pdl, budget, self.capability)
        ctas = num_ctas(problem, config, budget)
        if config.kernel == "ws":
            return _bind_ws(problem, mine, loaded, ctas, overlap)
        run = loaded.bind("6Q14q", ctas, overlap=overlap)
        numbers = pointer_numbers(problem, config, mine.unit)

        def launch(stream: int, *addresses: int) -> None:
            run(stream, *addresses, *numbers)

        return launch


def pointer_numbers(
    problem: ScaledGroupedProblem, config: GroupedConfig, unit: int
) -> tuple[int, ...]:
    """The pointer kernel's run-time numbers in its order."""
    p = problem
    strides = (p.a_stride // unit, p.w_stride // unit, p.expert_stride // unit, p.out_stride)
    steps = (p.a_step, p.a_block_step, p.w_step, p.w_expert_step)
    half, tiles_n = p.n if p.swiglu else 0, -(-p.n // config.block_n)
    return (*strides, *steps, p.rows, p.num_experts, p.n, half, p.k // unit, tiles_n)


def _bind_ws(
    problem: ScaledGroupedProblem,
    variant: ScaledGroupedVariant,
    loaded: LoadedKernel,
    ctas: int,
    overlap: bool,
) -> Launch:
    p, expert_rows = problem, problem.halves * problem.n
    numbers = (
        p.rows, p.num_experts, p.n // UNIT, expert_rows, p.n, p.out_stride // UNIT, p.a_step,
        p.a_block_step, p.w_step, p.w_expert_step, -(-p.n // variant.config.block_n),
        -(-p.k // BLOCK_K),
    )  # fmt: skip
    return loaded.bind_mapped(
        ctas,
        Mapped(PAIRS, (p.k // 2, p.rows), (p.a_stride,), 0),
        Mapped(PAIRS, (p.k // 2, p.num_experts * expert_rows), (p.w_stride,), 1),
        len(ADDRESSES),
        numbers,
        what=f"{ctas} CTAs of {variant}",
        overlap=overlap,
    )
