"""A GEMM of e4m3 by cuBLASLt, launched as our own are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.kernels.cublaslt import CublasLtPlan, library_of
from smkern.tuning.config import Budget, GemmProblem
from smkern.tuning.fp8 import ScaledProblem

if TYPE_CHECKING:
    from smkern.kernels.fp8.gemm_launch import Launch, Strides


@dataclass(frozen=True, slots=True, eq=False)
class LibraryPlan:
    """One problem and budget; `bind` makes launches."""

    problem: ScaledProblem
    library: CublasLtPlan

    @property
    def workspace_bytes(self) -> int:
        """What the library may write, and smkern's counters before it, bytes."""
        return self.library.workspace_bytes

    def bind(self, strides: Strides, *, static_weights: bool = False) -> Launch:
        """The launch for operands that lie so; thread-safe. The library fetches nothing early."""
        run = self.library.launch
        apart = strides.a, strides.w, strides.out, strides.residual

        def launch(
            a: int, w: int, a_scale: int, w_scale: int, out: int, bias: int, residual: int,
            workspace: int, stream: int,
        ) -> None:  # fmt: skip
            run(a, w, out, bias, residual, *apart, workspace, stream, a_scale, w_scale)

        return launch


def library_plan(problem: ScaledProblem, budget: Budget, index: int) -> LibraryPlan:
    """The plan of a problem on a device.

    Raises:
        DeviceError: there is no cuBLASLt that runs it.
    """
    plain = GemmProblem(
        problem.m, problem.n, problem.k, problem.out_dtype, problem.epilogue, problem.aligned
    )
    found = library_of(index).plan(plain, budget, problem.scales)
    found.ask()
    return LibraryPlan(problem, found)
