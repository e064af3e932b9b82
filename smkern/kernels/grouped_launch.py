"""From a grouped GEMM to its launch: variants, compilation, tensor maps."""

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
from smkern.tuning.bucket_table import power_of_two
from smkern.tuning.grouped import Budget, GroupedConfig, GroupedProblem, configs_of, num_ctas
from smkern.tuning.moe import VECTOR

WS_NUMBERS = ("rows", "num_experts", "n", "expert_rows", "half_rows", "out_stride", "tiles_n",
              "k_iters")  # fmt: skip
"""Run-time numbers of `grouped_ws`, which follow its maps and addresses."""
POINTER_SIGNATURE = (
    {"a_ptr": "*x", "w_ptr": "*x", "offsets_ptr": "*i32", "out_ptr": "*x"}
    | dict.fromkeys(("a_stride", "w_stride", "expert_stride", "half", "out_stride"), "i64")
    | dict.fromkeys(("rows", "num_experts", "n", "k", "tiles_n"), "i32")
)
"""Run-time parameters of `grouped_pointer`."""
COPY_REGS = 40
"""Registers of the copying warp's threads."""


@dataclass(frozen=True, slots=True, order=True)
class GroupedVariant:
    """One compiled kernel; `experts` is a power of two, at least 32."""

    kernel: str
    dtype: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool
    eager: bool
    tails: bool
    swiglu: bool
    experts: int
    unit: int
    ctas_per_sm: int
    capability: int

    def compile(self) -> Artifact:
        """Compile it into the user's cache (or take it from there). Needs no GPU.

        Raises:
            DeviceError: the kernel needs more shared memory than a CTA may have.
        """
        return compile_source((_ws_source if self.kernel == "ws" else _pointer_source)(self))


def variant_of(problem: GroupedProblem, config: GroupedConfig, capability: int) -> GroupedVariant:
    """The kernel for a problem and a configuration."""
    made = [x for x in configs_of(problem, capability) if _same_kernel(x, config)]
    return GroupedVariant(
        config.kernel, problem.dtype, config.block_m, config.block_n, config.block_k,
        config.num_warps, config.num_stages, config.swap, config.eager, config.tails,
        problem.swiglu,
        max(32, power_of_two(problem.num_experts)), VECTOR if problem.aligned else 1,
        made[0].ctas_per_sm if made else config.ctas_per_sm, capability,
    )  # fmt: skip


def _same_kernel(x: GroupedConfig, y: GroupedConfig) -> bool:
    """Whether two configurations differ in run-time numbers only."""
    return (x.kernel, x.block_m, x.block_n, x.block_k, x.num_warps, x.num_stages, x.swap) == (
        y.kernel, y.block_m, y.block_n, y.block_k, y.num_warps, y.num_stages, y.swap,
    )  # fmt: skip


def pointer_constants(variant: GroupedVariant) -> dict[str, Any]:
    """Compile-time parameters of the pointer kernel."""
    return {
        "BLOCK_M": variant.block_m,
        "BLOCK_N": variant.block_n,
        "BLOCK_K": variant.block_k,
        "STAGES": variant.num_stages,
        "GLU": variant.swiglu,
        "UNIT": variant.unit,
        "EXPERTS": variant.experts,
        "PDL": variant.capability >= OVERLAP_FROM,
    }


def _pointer_source(variant: GroupedVariant) -> KernelSource:
    from smkern.kernels.grouped_triton import grouped_pointer

    kinds = POINTER_SIGNATURE.items()
    return KernelSource(
        fn=grouped_pointer,
        signature={k: f"*{variant.dtype}" if kind == "*x" else kind for k, kind in kinds},
        constants=pointer_constants(variant),
        aligned=("a_ptr", "w_ptr", "out_ptr") if variant.unit == VECTOR else (),
        num_warps=variant.num_warps,
        capability=variant.capability,
        num_stages=variant.num_stages,
    )


def _ws_source(variant: GroupedVariant) -> KernelSource:
    from triton.experimental.gluon import language as gl

    from smkern.kernels.grouped_ws import grouped_ws

    warps, depth = variant.num_warps, variant.block_k
    boxes = {"a": (variant.block_m, depth), "w": (variant.block_n, depth)}
    signature = matrices(variant.dtype, **boxes)
    signature |= {"out_ptr": f"*{variant.dtype}", "offsets_ptr": "*i32"}
    signature |= dict.fromkeys(WS_NUMBERS, "i32")
    each = variant.experts // 32
    constants = {
        "BLOCK_M": variant.block_m,
        "BLOCK_N": variant.block_n,
        "BLOCK_K": depth,
        "STAGES": variant.num_stages,
        "EAGER": variant.eager,
        "GLU": variant.swiglu,
        "SWAP": variant.swap,
        "TAILS": variant.tails,
        "EXPERTS": variant.experts,
        # every warp holds all experts, so that its search is independent of other warps
        "COPY_LAYOUT": gl.BlockedLayout([each], [32], [1], [0]),
        "LAYOUT": gl.BlockedLayout([each], [32], [warps], [0]),
        "WARPS": warps,
        "COPY_REGS": COPY_REGS,
    }
    threads = 32 * (warps + 4)  # the copying warp's group is four warps wide
    registers = 65_536 // (threads * variant.ctas_per_sm) // 8 * 8
    return KernelSource(
        grouped_ws, signature, constants, ("out_ptr",), warps, variant.capability,
        maxnreg=min(registers, 255),
    )  # fmt: skip


class GroupedKernels(FamilyKernels[GroupedProblem]):
    """The grouped GEMM's kernels on one device."""

    def variants(self, problem: GroupedProblem) -> tuple[GroupedVariant, ...]:
        wanted = configs_of(problem, self.capability)
        return tuple(
            dict.fromkeys(variant_of(problem, config, self.capability) for config in wanted)
        )

    def prepare(self, problem: GroupedProblem, config: GroupedConfig, budget: Budget) -> Launch:
        """launch(stream, a, w, offsets, out); loads all kernels of the kind on first use."""
        mine = variant_of(problem, config, self.capability)
        self._load(problem)
        loaded = self._set.load(mine, mine.compile)
        ctas = num_ctas(problem, config, budget)
        overlap = may_overlap(config.pdl, budget, self.capability)
        if mine.kernel == "ws":
            return _bind_ws(problem, mine, loaded, ctas, overlap)
        run = loaded.bind("4Q10q", ctas, overlap=overlap)
        numbers = pointer_numbers(problem, config, mine.unit)

        def launch(stream: int, a: int, w: int, offsets: int, out: int) -> None:
            run(stream, a, w, offsets, out, *numbers)

        return launch


def pointer_numbers(problem: GroupedProblem, config: GroupedConfig, unit: int) -> tuple[int, ...]:
    """The pointer kernel's run-time numbers in its order."""
    p = problem
    strides = (p.a_stride, p.w_stride, p.expert_stride, p.n * p.w_stride, p.out_stride)
    tiles_n = -(-p.n // config.block_n)
    return (*(x // unit for x in strides), p.rows, p.num_experts, p.n // unit, p.k // unit, tiles_n)


def _bind_ws(
    problem: GroupedProblem, variant: GroupedVariant, loaded: LoadedKernel, ctas: int, overlap: bool
) -> Launch:
    p, expert_rows = problem, problem.halves * problem.n
    numbers = (
        p.rows, p.num_experts, p.n // VECTOR, expert_rows, p.n, p.out_stride // VECTOR,
        -(-p.n // variant.block_n), -(-p.k // variant.block_k),
    )  # fmt: skip
    a = Mapped(p.dtype, (p.k, p.rows), (2 * p.a_stride,), 0)
    w = Mapped(p.dtype, (p.k, p.num_experts * expert_rows), (2 * p.w_stride,), 1)
    run = loaded.bind_mapped(
        ctas, a, w, 2, numbers, what=f"{ctas} CTAs of {variant}", overlap=overlap
    )

    def launch(stream: int, a: int, w: int, offsets: int, out: int) -> None:
        run(stream, a, w, out, offsets)

    return launch
