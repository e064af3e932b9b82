"""Gate, up and the quantized product of both: its kernel compiled without a GPU, and its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from smkern.kernels.aot import KernelSource, LoadedKernel, Mapped, compile_source, matrices
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import may_overlap
from smkern.kernels.fp8.gemm_compile import PAIRS
from smkern.tuning import fp8
from smkern.tuning.config import Budget, GemmConfig
from smkern.tuning.constraints import num_ctas
from smkern.tuning.fp8 import ScaledProblem

BLOCK = 128
NUMBERS = (
    "m", "out_stride", "out_step", "out_block_step", "a_step", "a_block_step", "w_step", "tiles_x",
    "tiles_y", "k_iters", "group", "early",
)  # fmt: skip
"""Run-time numbers of `fp8_gemm_gated`, which follow its maps and addresses."""
ADDRESSES = {"out_ptr": "*fp8e4nv", "out_scale": "*fp32", "a_scale": "*fp32", "w_scale": "*fp32"}

Launch = Callable[[int, int, int, int, int, int, int], None]
"""launch(a, w, a_scale, w_scale, out_scale, out, stream): addresses."""


class GatedStrides(NamedTuple):
    """Elements between rows of matrices, and between scales."""

    a: int
    w: int
    out: int
    out_step: int
    out_block_step: int
    a_step: int
    a_block_step: int
    w_step: int


@dataclass(frozen=True, slots=True, order=True)
class GatedVariant:
    """One compiled kernel; gate, up and their product are rounded to `dtype`."""

    dtype: str
    capability: int

    def compile(self) -> Artifact:
        """Compile it into the user's cache (or take it from there). Needs no GPU."""
        from triton.experimental.gluon import language as gl

        from smkern.kernels.fp8.gemm_gated import fp8_gemm_gated as kernel

        config = fp8.GATED
        signature = matrices(PAIRS, x=(BLOCK, fp8.STEP), y=(1, 2, BLOCK, fp8.STEP))
        constants: dict[str, Any] = {
            "BLOCK_K": fp8.STEP,
            "STAGES": config.num_stages,
            "DTYPE": {"bf16": gl.bfloat16, "fp16": gl.float16}[self.dtype],
            "MMA": gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]
            ),
            "LAYOUT": gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]),
            "FLAT": gl.NVMMASharedLayout.get_default_for([64, 2 * fp8.STEP], gl.float8e4nv),
            "REGS": fp8.multiply_registers(config),
            "COPY_REGS": fp8.COPY_REGISTERS,
        }
        signature |= ADDRESSES | dict.fromkeys(NUMBERS, "i32")
        return compile_source(
            KernelSource(
                kernel, signature, constants, ("out_ptr",), 4, self.capability,
                maxnreg=fp8.base_registers(config),
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class GatedPlan:
    """One problem, configuration and budget with its loaded kernel; `bind` makes launches."""

    problem: ScaledProblem
    config: GemmConfig
    budget: Budget
    loaded: LoadedKernel

    @property
    def workspace_bytes(self) -> int:
        return 0

    def bind(self, strides: GatedStrides, *, static_weights: bool = False) -> Launch:
        """The launch for operands that lie so; thread-safe.

        Args:
            strides: Of all operands.
            static_weights: No running kernel writes w, so its first stages are fetched at once.
        """
        p, config = self.problem, self.config
        overlap = may_overlap(config.overlap, self.budget, 90)
        tiles_x, tiles_y = -(-p.m // BLOCK), p.n // (2 * BLOCK)
        ctas = min(num_ctas(config, self.budget), tiles_x * tiles_y)
        of_gate = (strides.w, p.n // 2 * strides.w, BLOCK * strides.w)
        numbers = (
            p.m, strides.out // fp8.GATED_UNIT, *strides[3:], tiles_x, tiles_y, p.k // BLOCK,
            min(config.group_m, tiles_x), fp8.GATED.num_stages if static_weights and overlap else 0,
        )  # fmt: skip
        run = self.loaded.bind_mapped(
            ctas,
            Mapped(PAIRS, (p.k // 2, p.m), (strides.a,), 0),
            Mapped(PAIRS, (p.k // 2, BLOCK, 2, tiles_y), of_gate, 1),
            len(ADDRESSES),
            numbers,
            what=f"{ctas} CTAs of {p}",
            overlap=overlap,
        )

        def launch(
            a: int, w: int, a_scale: int, w_scale: int, out_scale: int, out: int, stream: int
        ) -> None:
            run(stream, a, w, out, out_scale, a_scale, w_scale)

        return launch
