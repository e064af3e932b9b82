"""What the tests of e4m3 share on a GPU: operands in frames of NaN, the truth in fp64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smkern.kernels.fp8.gemm_compile import variant_of
from smkern.ops.fp8.call import ScaledGemm
from smkern.ops.fp8.dispatch import bind_plan, fp8_dispatcher, problem_of
from smkern.ops.gemm.call import row_stride
from smkern.ops.reference import fp8
from smkern.ops.reference import gemm as reference
from smkern.tuning.config import Budget, Epilogue, GemmConfig
from smkern.tuning.fp8 import ScaledProblem
from tests.gpu.compiling import compile_ahead
from tests.gpu.gemm_support import TORCH, capability, check_frame, check_near, framed

KINDS = {
    "tensor": ("tensor", "tensor"),
    "row": ("token", "token"),
    "mixed": ("token", "tensor"),
    "block": ("block", "weight_block"),
}
LOST = 2.0**-10
"""Of the sum of magnitudes: what tensor cores may lose of e4m3 products between two promotions."""


@dataclass(frozen=True, slots=True)
class Case:
    """One scaled GEMM under test."""

    m: int = 96
    n: int = 256
    k: int = 512
    kind: str = "block"
    dtype: str = "bf16"
    epilogue: Epilogue = field(default_factory=Epilogue)
    padding: int = 0

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}-{self.kind}-{self.dtype}"
        return f"{size}-{self.epilogue.key}-pad{self.padding}"


@dataclass(slots=True)
class Operands:
    """Tensors of a case; inputs and the result lie in NaN."""

    a: Tensor
    w: Tensor
    a_scale: Tensor
    w_scale: Tensor
    bias: Tensor | None
    residual: Tensor | None
    out: Tensor
    frame: Tensor

    def given(self) -> dict[str, Any]:
        """The keyword arguments of `smkern.gemm` but for the activation."""
        return {
            "a": self.a, "w": self.w, "a_scale": self.a_scale, "w_scale": self.w_scale,
            "bias": self.bias, "residual": self.residual, "out": self.out,
        }  # fmt: skip


def _e4m3(x: Tensor, padding: int) -> Tensor:
    """The same in rows that are 16 + padding bytes apart, NaN between them."""
    rows, columns = x.shape
    pitch = -(-columns // 16) * 16 + 16 + padding
    wide = torch.full((rows, pitch), 0x7F, dtype=torch.uint8, device="cuda")
    wide[:, :columns] = x.view(torch.uint8)
    return wide[:, :columns].view(torch.float8_e4m3fn)


def operands(case: Case, seed: int = 0) -> Operands:
    """Normal random inputs of rows of very different size, quantised by the reference."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = TORCH[case.dtype]

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device="cuda", generator=generator)

    def spread(rows: int) -> Tensor:
        sizes = torch.randn(rows, case.k // 128 + 1, device="cuda", generator=generator).exp()
        x = random(rows, case.k) * sizes.repeat_interleave(128, 1)[:, : case.k]
        return x / case.k**0.25

    a_kind, w_kind = KINDS[case.kind]
    a, a_scale = fp8.quantize(spread(case.m), a_kind)
    w, w_scale = fp8.quantize(spread(case.n), w_kind)
    if a_kind == "block" and seed % 2 == 0:  # by columns, as its writers may like it
        a_scale = a_scale.t().contiguous().t()
    bias = random(1, case.n)[0].to(dtype) if case.epilogue.bias else None
    residual = None
    if case.epilogue.residual:
        residual = framed(case.m, case.n, dtype, case.padding)[0].copy_(random(case.m, case.n))
    out, frame = framed(case.m, case.n, dtype, case.padding)
    return Operands(
        _e4m3(a, case.padding), _e4m3(w, case.padding), a_scale, w_scale, bias, residual, out,
        frame,
    )  # fmt: skip


def check(case: Case, x: Operands, out: Tensor | None = None) -> float:
    """Hold a result against fp64 of the quantised operands; its relative error (Frobenius)."""
    found = x.out if out is None else out
    a, w = (
        fp8.dequantize(y, scale, torch.float64) for y, scale in ((x.a, x.a_scale), (x.w, x.w_scale))
    )
    want = reference.gemm(
        a, w, bias=x.bias, residual=x.residual, activation=case.epilogue.activation,
        compute_dtype=torch.float64, out_dtype=torch.float64,
    )  # fmt: skip
    magnitude = a.abs() @ w.abs().T
    eps = torch.finfo(found.dtype).eps
    tolerance = 0.52 * eps * want.abs() + LOST * magnitude + 1e-5
    check_near(found, want, tolerance, case)
    if out is None:
        check_frame(x.frame, found)
    return float((found.double() - want).norm() / want.norm())


def problem_for(case: Case, x: Operands) -> tuple[ScaledProblem, Any]:
    """What a launch of a case is decided by, and its call."""
    given = x.given()
    call = ScaledGemm(**given, activation=case.epilogue.activation)
    aligned = not any(y.data_ptr() % 16 for y in given.values() if y is not None)
    problem = problem_of(call, aligned)
    assert problem is not None
    return problem, call


def run_config(
    case: Case, x: Operands, config: GemmConfig, budget: Budget, *, checked: bool = True
) -> None:
    """Launch a configuration on the current stream, its workspace's partials poisoned.

    `checked`: wait for it, and look whether its counters are zero again.
    """
    problem, call = problem_for(case, x)
    kernels: Any = fp8_dispatcher(0).kernels()
    plan = kernels.prepare(problem, config, budget)
    bound = bind_plan(plan, call, x.w, row_stride(x.out), row_stride(x.residual))
    room = torch.zeros(max(plan.workspace_bytes, 1 << 16), dtype=torch.uint8, device="cuda")
    room[1 << 16 :].fill_(255)
    named = (x.a, x.w, x.a_scale, x.w_scale, x.out, x.bias, x.residual, room)
    assert bound.launch is not None
    bound.launch(
        *(0 if y is None else y.data_ptr() for y in named), torch.cuda.current_stream().cuda_stream
    )
    if checked:
        assert not bool(room[: 1 << 16].any()), f"{config}: counters are left behind"


def precompile(wanted: Iterable[tuple[ScaledProblem, GemmConfig]]) -> None:
    """Compile in parallel what tests will launch."""
    compile_ahead(variant_of(problem, config, capability()) for problem, config in wanted)
