"""What the tests of `gemm_swiglu` on a GPU share: operands in poisoned frames, ground truth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.ops.operator_eager import EagerOperator
from smkern.ops.swiglu.operator import EPILOGUE, GEMM_SWIGLU
from smkern.tuning.config import Dtype, GemmProblem
from tests.gpu import gemm_support
from tests.gpu.gemm_support import TORCH, Operands, check_frame, check_near, framed


@dataclass(frozen=True, slots=True)
class Case:
    """One call under test. `spacing`: row pitches grow by so many elements."""

    m: int = 96
    inner: int = 256
    k: int = 512
    dtype: Dtype = "bf16"
    spacing: int = 0

    @property
    def problem(self) -> GemmProblem:
        aligned = self.spacing % 8 == 0 and self.inner % 8 == 0 and self.k % 8 == 0
        return GemmProblem(self.m, 2 * self.inner, self.k, self.dtype, EPILOGUE, aligned)

    def __str__(self) -> str:
        return f"{self.m}x{self.inner}x{self.k}-{self.dtype}" + f"-pad{self.spacing}" * bool(
            self.spacing
        )


def operands(case: Case, seed: int = 0) -> Operands:
    """Normal random a; w so that gates are of the size where SiLU bends."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = TORCH[case.dtype]

    def filled(rows: int, cols: int, scale: float) -> Tensor:
        view, _ = framed(rows, cols, dtype, case.spacing)
        return view.copy_(scale * torch.randn((rows, cols), device="cuda", generator=generator))

    a = filled(case.m, case.k, 1.0)
    w = filled(2 * case.inner, case.k, 2 * case.k**-0.5)
    out, frame = framed(case.m, case.inner, dtype, case.spacing)
    return Operands(a, w, None, None, out, frame)


def check(case: Case, x: Operands, out: Tensor | None = None, *, unfused: bool = False) -> None:
    """Hold an output against float64, and its frame against writes.

    One rounding of the result, what fp32 accumulation in the tensor cores may lose of gate and up
    (2^-18 of the sums of magnitudes), and unfused one rounding of each, through the derivatives.
    """
    out = x.out if out is None else out
    gate, up = (x.a.double() @ x.w.double().t()).chunk(2, dim=1)
    lost, lost_up = (2**-18 * (x.a.double().abs() @ x.w.double().abs().t())).chunk(2, dim=1)
    eps = torch.finfo(out.dtype).eps
    if unfused:
        lost, lost_up = lost + 0.51 * eps * gate.abs(), lost_up + 0.51 * eps * up.abs()
    silu = torch.nn.functional.silu(gate)
    want = silu * up
    # |silu'| is at most 1.1; the exponential is good to 2^-20
    tolerance = 1.1 * lost * up.abs() + silu.abs() * lost_up + lost * lost_up
    tolerance += (0.52 * eps + 2**-20) * want.abs() + 1e-6
    check_near(out, want, tolerance, case)
    if out is x.out:
        check_frame(x.frame, out)


def fresh_eager() -> EagerOperator:
    """The eager path with nothing loaded, beside the process's own."""
    return gemm_support.fresh_eager(GEMM_SWIGLU)
