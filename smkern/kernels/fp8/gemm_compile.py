"""The compiled GEMM of e4m3 that a problem and a configuration need, made without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.kernels.aot import KernelSource, compile_source, matrices
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import OVERLAP_FROM
from smkern.kernels.gemm_variants import Variant
from smkern.tuning import fp8
from smkern.tuning.config import GemmConfig
from smkern.tuning.fp8 import ScaledProblem

NUMBERS = (
    "m", "n", "out_stride", "residual_stride", "a_step", "a_block_step", "w_step", "tiles_x",
    "tiles_y", "k_iters", "whole_tiles", "stream_iters", "quantum", "group", "early",
)  # fmt: skip
"""Run-time numbers of `fp8_gemm_ws`, which follow its maps and addresses."""
POINTER_NUMBERS = (
    "m", "n", "k", "a_stride", "w_stride", "out_stride", "residual_stride", "a_step",
    "a_block_step", "w_step", "tiles_m", "tiles_n", "group",
)  # fmt: skip
UNIT = 8
"""Elements of the result that n and its strides count, in `fp8_gemm_ws`."""
PAIRS = "fp16"
"""What operands are copied as: two e4m3 are moved like one of 16 bits."""


@dataclass(frozen=True, slots=True, order=True)
class ScaledVariant:
    """One compiled kernel; X is the row side of the matrix unit: `a`, or `w` if swapped.

    `unit`: elements that strides of a and w and k are counted in, 16 where rows are aligned.
    """

    kernel: str
    out_dtype: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swap: bool
    stream: bool
    blocks: bool
    bias: bool
    residual: bool
    activation: str
    ctas_per_sm: int
    unit: int
    capability: int

    @property
    def parts(self) -> int:
        """Warpgroups that multiply."""
        return self.num_warps // 4

    @property
    def sums(self) -> int:
        """Sums of a warpgroup's columns: a wide tile has one for each 64."""
        return self.columns // 64 if self.columns > 128 else 1

    @property
    def rows(self) -> int:
        """Rows of a tile on the matrix unit's row side."""
        return self.block_n if self.swap else self.block_m

    @property
    def columns(self) -> int:
        """Columns of a tile there."""
        return self.block_m if self.swap else self.block_n

    @property
    def twin(self) -> Variant:
        """The kernel of 16-bit elements that copies and stores the same bytes."""
        return Variant(
            self.kernel, self.out_dtype, self.rows, self.columns, fp8.STEP, self.num_warps,
            self.num_stages, self.swap, self.stream, self.bias, self.residual, self.activation,
            unit=1, ctas_per_sm=self.ctas_per_sm, eager=False, capability=self.capability,
        )  # fmt: skip

    def compile(self) -> Artifact:
        """Compile it into the user's cache (or take it from there). Needs no GPU.

        Raises:
            DeviceError: the kernel needs more shared memory than a CTA may have, or is CUTLASS's
                and can neither be compiled here nor was before.
        """
        if self.kernel == "cutlass":
            from smkern.kernels.cute import compile as cute

            return cute.compile_variant(self)
        return compile_source((_ws_source if self.kernel == "ws" else _pointer_source)(self))


def variant_of(problem: ScaledProblem, config: GemmConfig, capability: int) -> ScaledVariant:
    """The kernel that runs `config` on `problem`; `capability` is 89, 90, ..."""
    epilogue = problem.epilogue
    assert problem.blocks or not fp8.is_wide(config), "wide tiles take scales of blocks only"
    return ScaledVariant(
        kernel=config.kernel,
        out_dtype=problem.out_dtype,
        block_m=config.block_m,
        block_n=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        swap=config.swap,
        # of two sums of columns the compiler keeps both in registers only in the streamed kernel
        stream=config.split != 1 or fp8.is_wide(config),
        blocks=problem.blocks,
        bias=epilogue.bias,
        residual=epilogue.residual,
        activation=epilogue.activation or "none",
        ctas_per_sm=1 if config.kernel == "pointer" else config.ctas_per_sm,
        unit=16 if problem.aligned else 1,
        capability=capability,
    )


def _epilogue(variant: ScaledVariant) -> dict[str, Any]:
    return {"BIAS": variant.bias, "RESIDUAL": variant.residual, "ACT": variant.activation}


def _addresses(variant: ScaledVariant) -> dict[str, str]:
    pointers = dict.fromkeys(("out_ptr", "bias_ptr", "residual_ptr"), f"*{variant.out_dtype}")
    return pointers | {"a_scale": "*fp32", "w_scale": "*fp32"}


def _pointer_source(variant: ScaledVariant) -> KernelSource:
    from smkern.kernels.fp8.gemm_triton import fp8_gemm_pointer

    addresses = {"a_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv"} | _addresses(variant)
    return KernelSource(
        fn=fp8_gemm_pointer,
        signature=addresses | dict.fromkeys(POINTER_NUMBERS, "i32"),
        constants={
            "BLOCK_M": variant.block_m,
            "BLOCK_N": variant.block_n,
            "BLOCK_K": 2 * fp8.STEP,
            "STAGES": variant.num_stages,
            "UNIT": variant.unit,
            "BLOCKS": variant.blocks,
            "PDL": variant.capability >= OVERLAP_FROM,
        }
        | _epilogue(variant),
        aligned=("a_ptr", "w_ptr") if variant.unit == 16 else (),
        num_warps=variant.num_warps,
        capability=variant.capability,
        num_stages=variant.num_stages,
    )


def _ws_source(variant: ScaledVariant) -> KernelSource:
    from triton.experimental.gluon import language as gl

    from smkern.kernels.fp8.gemm_ws import fp8_gemm_ws

    columns = variant.columns // variant.sums
    high = columns if variant.sums == 3 else min(variant.columns, 128)
    signature = matrices(PAIRS, x=(variant.rows, fp8.STEP), y=(high, fp8.STEP))
    addresses = _addresses(variant)
    scales = {name: addresses.pop(name) for name in ("a_scale", "w_scale")}
    signature |= addresses | {"partials": "*fp32", "counters": "*i32"} | scales
    signature |= dict.fromkeys(NUMBERS, "i32")
    config = GemmConfig(
        "ws", variant.block_m, variant.block_n, fp8.STEP, variant.num_warps, variant.num_stages,
        variant.swap, variant.ctas_per_sm,
    )  # fmt: skip
    constants = {
        "PARTS": variant.parts,
        "ALONE": variant.parts * variant.ctas_per_sm == 1,
        "BLOCK_Y": columns,
        "SUMS": variant.sums,
        "BLOCK_K": fp8.STEP,
        "STAGES": variant.num_stages,
        "BLOCKS": variant.blocks,
        "STREAM": variant.stream,
        "SWAP": variant.swap,
        "MMA": gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32]
        ),
        "LAYOUT": store_layout(gl, columns, variant.swap),
        "FLAT": gl.NVMMASharedLayout.get_default_for([64, 2 * fp8.STEP], gl.float8e4nv),
        "REGS": fp8.multiply_registers(config),
        "COPY_REGS": fp8.COPY_REGISTERS,
    } | _epilogue(variant)
    aligned = ("partials", "counters", "out_ptr", "bias_ptr", "residual_ptr")
    # a partition has 4 warps, and the launch as many again for each part and the copying warp
    return KernelSource(
        fp8_gemm_ws, signature, constants, aligned, 4, variant.capability,
        maxnreg=fp8.base_registers(config),
    )  # fmt: skip


def store_layout(gl: Any, columns: int, swap: bool) -> Any:
    """16 bytes per thread of 64 rows by `columns`, contiguous along the output's rows."""
    if swap:
        return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
