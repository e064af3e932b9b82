"""A GEMM's problem, budget and configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smkern.device import Budget as Budget
from smkern.device import Confinement as Confinement

Dtype = Literal["bf16", "fp16", "fp32"]
Activation = Literal["silu", "gelu"]
Kernel = Literal["tma", "pointer", "ws", "cutlass", "cublaslt", "unfused"]
"""smkern's kernels, of which "cutlass" needs an extra, cuBLASLt, and for SwiGLU a plain GEMM
followed by `silu_and_mul`."""

STREAM_K = 0
"""Value of `GemmConfig.split` that spreads the K loops of the last, partial wave over all CTAs."""


@dataclass(frozen=True, slots=True, order=True)
class Epilogue:
    """What is applied to the fp32 accumulator before the store: act(acc + bias) + residual.

    `swiglu` excludes the others: silu(gate) * up, with w's first n / 2 rows for gate, the rest up.
    """

    bias: bool = False
    residual: bool = False
    activation: Activation | None = None
    swiglu: bool = False

    @property
    def key(self) -> str:
        if self.swiglu:
            return "swiglu"
        parts = [name for name in ("bias", "residual") if getattr(self, name)]
        return "+".join([*parts, *([self.activation] if self.activation else [])]) or "none"


@dataclass(frozen=True, slots=True, order=True)
class GemmProblem:
    """out [m, n] = a [m, k] @ w [n, k]^T; with SwiGLU, out [m, n / 2].

    `aligned`: a, w and out have 16-byte rows and bases.
    """

    m: int
    n: int
    k: int
    dtype: Dtype = "bf16"
    epilogue: Epilogue = Epilogue()
    aligned: bool = True
    batch_invariant: bool = False

    @property
    def out_columns(self) -> int:
        return self.n // 2 if self.epilogue.swiglu else self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Each operand read once, the output written once."""
        size = 4 if self.dtype == "fp32" else 2
        reads = self.m * self.k + self.n * self.k + self.m * self.n * self.epilogue.residual
        return size * (reads + self.m * self.out_columns + self.n * self.epilogue.bias)


@dataclass(frozen=True, slots=True, order=True)
class GemmConfig:
    """One way to run a GEMM. All but the tile, warps, stages and `swap` are run-time numbers.

    `split`: 1 for whole K loops, s > 1 for K in s pieces, or STREAM_K. The last CTA to arrive sums
    the pieces. `ctas_per_sm`: resident CTAs per SM, under a mask only (a grid budget launches at
    most one per SM). `max_ctas`: 0, or a cap on the grid below the budget. `swap`: weights on the
    row side of the matrix unit; block_m still counts rows of `a` and block_n rows of `w`.
    `eager` ("ws" only): release a stage when its product is done, not a step later; for
    memory-bound shapes. A "ws" tile's column side may be 3/2 or 5/4 of a power of two; that of
    "cutlass" any multiple of 8.
    `overlap` ("ws", "cutlass"): the launch may begin while the previous kernel on the stream still
    runs, where a mask confines both (programmatic dependent launch).
    """

    kernel: Kernel
    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    swap: bool = False
    ctas_per_sm: int = 1
    split: int = 1
    group_m: int = 8
    max_ctas: int = 0
    eager: bool = False
    overlap: bool = True
