"""What the tests of `gemm_swiglu` on a GPU share: operands in poisoned frames, ground truth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.ops.gemm.dispatch import gemm_dispatcher
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.swiglu.operator import EPILOGUE, GEMM_SWIGLU
from smkern.tuning.config import Budget, Dtype, GemmConfig, GemmProblem
from tests.gpu.gemm_support import GUARD, TORCH, framed


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


@dataclass(slots=True)
class Operands:
    """Tensors of a case: inputs lie in NaNs, the output in NaNs and made of NaNs."""

    a: Tensor
    w: Tensor
    out: Tensor
    frame: Tensor

    def on_host(self) -> Operands:
        """The same on the CPU, so that no library's kernel has to run for the ground truth."""
        frame, (rows, cols) = self.frame.cpu(), self.out.shape
        out = frame[GUARD : GUARD + rows, GUARD : GUARD + cols]
        return Operands(self.a.cpu(), self.w.cpu(), out, frame)


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
    return Operands(a, w, out, frame)


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
    wrong = ~((out.double() - want).abs() <= tolerance)
    if wrong.any():
        row, col = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{case}: {int(wrong.sum())} of {wrong.numel()} wrong, first at [{row}, {col}]: "
            f"{out[row, col].item()} for {want[row, col].item()} ± {tolerance[row, col].item()}"
        )
    if out is x.out:
        outside = torch.ones_like(x.frame, dtype=torch.bool)
        outside[GUARD : GUARD + case.m, GUARD : GUARD + case.inner] = False
        assert x.frame[outside].isnan().all(), f"{case}: wrote outside of out"


def run_config(case: Case, x: Operands, config: GemmConfig, budget: Budget) -> None:
    """Launch a configuration on the current stream, its workspace poisoned but for its counters."""
    dispatcher = gemm_dispatcher(torch.cuda.current_device())
    plan = dispatcher.prepare(case.problem, config, budget)
    room = torch.zeros(max(plan.workspace_bytes, 1 << 16), dtype=torch.uint8, device="cuda")
    room[1 << 16 :].fill_(255)
    plan.launch(
        x.a.data_ptr(), x.w.data_ptr(), x.out.data_ptr(), 0, 0,
        x.a.stride(0), x.w.stride(0), x.out.stride(0), 0,
        room.data_ptr(), torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    assert not room[: 1 << 16].any(), f"{config}: counters are left behind"


def fresh_eager() -> EagerOperator:
    """The eager path with nothing loaded, beside the process's own."""
    from tests.gpu.gemm_support import fresh_eager as fresh_gemm

    return fresh_gemm(GEMM_SWIGLU)
