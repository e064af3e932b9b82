"""The compiled kernel that a problem and a configuration need; all else is a run-time number."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.errors import ArgumentError
from smkern.tuning.config import GemmConfig, GemmProblem


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """One compiled GEMM kernel. X is the row side of the matrix unit: `a`, or `w` if swapped.

    `unit`: n, k and the strides are passed in units of 8 elements, which tells the compiler that
    16-byte accesses are aligned, or of 1 where they are not.
    """

    kernel: str
    dtype: str
    block_x: int
    block_y: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool
    stream: bool
    bias: bool
    residual: bool
    activation: str
    unit: int
    ctas_per_sm: int
    eager: bool
    capability: int

    @property
    def extra_y(self) -> int:
        """Excess of block_y over a power of two: the width of a second accumulator, or 0."""
        return self.block_y - (1 << (self.block_y.bit_length() - 1))

    @property
    def uses_tma(self) -> bool:
        return self.kernel in ("tma", "ws", "cutlass")

    @property
    def swiglu(self) -> bool:
        return self.activation == "swiglu"

    @property
    def interleaves(self) -> bool:
        """Whether a copy alternates 8 gate rows and 8 up rows, which the kernel combines."""
        return self.swiglu and self.kernel in ("ws", "cutlass")


def variant_of(problem: GemmProblem, config: GemmConfig, capability: int) -> Variant:
    """The kernel variant that runs `config` on `problem`; `capability` is 80, 90, ..."""
    if config.kernel in ("tma", "ws", "cutlass") and not problem.aligned:
        raise ArgumentError(
            f"kernel {config.kernel!r} needs 16-byte aligned rows and bases, which this problem "
            f"({problem.m}x{problem.n}x{problem.k}, {problem.dtype}) lacks; use 'pointer'"
        )
    if config.kernel == "ws" and config.block_k != 64 and _is_odd(config):
        raise ArgumentError(
            f"kernel 'ws' has tiles of {config.block_m}x{config.block_n} only with block_k=64, not "
            f"{config.block_k}: its two accumulators' boxes lie apart otherwise"
        )
    block_x, block_y = config.block_m, config.block_n
    if config.swap:
        block_x, block_y = block_y, block_x
    return Variant(
        kernel=config.kernel,
        dtype=problem.dtype,
        block_x=block_x,
        block_y=block_y,
        block_k=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        swap=config.swap,
        stream=config.split != 1,
        bias=problem.epilogue.bias,
        residual=problem.epilogue.residual,
        activation="swiglu" if problem.epilogue.swiglu else problem.epilogue.activation or "none",
        unit=8 if problem.aligned else 1,
        ctas_per_sm=config.ctas_per_sm if config.kernel == "ws" else 1,
        eager=config.eager and config.kernel == "ws",
        capability=capability,
    )


def _is_odd(config: GemmConfig) -> bool:
    """Whether the tile's column side is not a power of two."""
    columns = config.block_m if config.swap else config.block_n
    return bool(columns & (columns - 1))
