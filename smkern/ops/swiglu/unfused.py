"""SwiGLU as two launches: the plain GEMM into the workspace, then `silu_and_mul` out of it."""

from __future__ import annotations

from collections.abc import Callable

from smkern.ops.gemm.plans import Plan
from smkern.ops.operator_dispatch import OperatorDispatcher
from smkern.tuning import constraints
from smkern.tuning.config import Budget, GemmProblem
from smkern.tuning.rows import VECTOR, RowsConfig, RowsProblem


class RowsSilu:
    """`silu_and_mul` for unfused plans, by its own dispatcher.

    Args:
        dispatcher: The device's dispatcher of operators over rows.
    """

    def __init__(self, dispatcher: OperatorDispatcher[RowsProblem, RowsConfig]) -> None:
        self._dispatcher = dispatcher

    def is_loaded(self, problem: GemmProblem) -> bool:
        """Whether `bind` would compile and load nothing."""
        return self._dispatcher.kernels().is_loaded(_rows(problem))

    def bind(
        self, problem: GemmProblem, budget: Budget, out_stride: int
    ) -> Callable[[int, int, int], None]:
        """launch(gate and up [m, n], out [m, n / 2], stream), by addresses."""
        run = self._dispatcher.launch(_rows(problem), budget)
        # unfused problems are aligned: rows count in 16 bytes
        steps = problem.n // VECTOR, out_stride // VECTOR, problem.m

        def launch(gate_up: int, out: int, stream: int) -> None:
            run(stream, gate_up, out, *steps)

        return launch


def _rows(problem: GemmProblem) -> RowsProblem:
    dtype = problem.dtype
    assert dtype != "fp32", "the GPU path takes bf16 and fp16"
    return RowsProblem("silu_and_mul", problem.m, problem.n // 2, dtype, dtype)


class UnfusedPlan:
    """Both launches of a problem in a budget, as one plan.

    Gate and up lie in the workspace behind the GEMM's own part, so nothing is allocated and the
    stream keeps neighbours off them.
    """

    __slots__ = ("_budget", "_gate_up_at", "_gemm", "_problem", "_silu", "workspace_bytes")

    def __init__(self, problem: GemmProblem, budget: Budget, gemm: Plan, silu: RowsSilu) -> None:
        self._problem, self._budget, self._gemm, self._silu = problem, budget, gemm, silu
        self._gate_up_at = constraints.gate_up_at(gemm.workspace_bytes)
        self.workspace_bytes = self._gate_up_at + constraints.gate_up_bytes(problem)

    def bind(
        self, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        static_weights: bool = False,
    ) -> Callable[[int, int, int, int, int, int, int], None]:  # fmt: skip
        """As `GemmPlan.bind`; there is no bias and no residual."""
        gemm = self._gemm.bind(
            a_stride, w_stride, self._problem.n, 0, static_weights=static_weights
        )
        silu = self._silu.bind(self._problem, self._budget, out_stride)
        offset = self._gate_up_at

        def launch(
            a: int, w: int, out: int, bias: int, residual: int, workspace: int, stream: int
        ) -> None:
            gate_up = workspace + offset
            gemm(a, w, gate_up, 0, 0, workspace, stream)
            silu(gate_up, out, stream)

        return launch
