"""Why a GEMM runs as it does."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.tuning import constraints
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.fp8 import ScaledProblem


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a GEMM runs as it does.

    `source`: "table" (a tuned cell), "near" (one of the same weights, in budgets or rows beside
    these), "warmup" (the fastest of the model's best, measured by `smkern.warmup(tune=True)`),
    "model" (the cost model), "library" (cuBLASLt, on the whole device where no cell has these very
    rows, or e4m3 has many), "forced" (`backend=` named the kernel). `predicted_us` is the model's
    time either way, the library's as if our own ran.
    """

    problem: GemmProblem | ScaledProblem
    budget: Budget
    config: GemmConfig
    source: str
    predicted_us: float
    workspace_bytes: int
    tiles: int
    waves: float
    device: str

    def __str__(self) -> str:
        p, b, c = self.problem, self.budget, self.config
        tile = f"{c.block_m}x{c.block_n}x{c.block_k}"
        split = "stream-K" if c.split == 0 else f"split {c.split}"
        how = "its own choice" if c.kernel in constraints.LIBRARIES else f"{tile}, {split}"
        return (
            f"gemm {p.m}x{p.n}x{p.k} {p.dtype} ({p.epilogue.key}) on {b.num_sms} SMs of "
            f"{self.device} (confined by {b.confined}): kernel {c.kernel}, {how}, "
            f"{self.tiles} tiles in {self.waves:.2f} waves, "
            f"{self.predicted_us:.1f} us expected; chosen by {self.source}"
        )
