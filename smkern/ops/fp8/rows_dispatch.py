"""From rows that become e4m3 to their launch on one device."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from smkern.limits import check_fp8_capability
from smkern.ops.checks import FP8_BLOCK, dtype_name
from smkern.ops.fp8.scales import block_steps
from smkern.ops.moe.check import gpu_dtype
from smkern.ops.operator import Bound
from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.fp8_rows import Budget, Group, QuantConfig, QuantOp, QuantProblem, choose
from smkern.tuning.rows import VECTOR


@cache
def quant_dispatcher(index: int) -> OperatorDispatcher[QuantProblem, QuantConfig]:
    """The dispatcher of a device that is present.

    Raises:
        DeviceError: a GPU without e4m3.
    """
    from smkern.kernels.fp8.rows_launch import QuantKernels

    found = load_dispatcher(index, QuantKernels, lambda profile: choose)
    check_fp8_capability(found.capability)
    return found


def problem_of(
    op: QuantOp, group: Group, x: Tensor, width: int, matrices: list[Tensor | None], aligned: bool,
    weight: Tensor | None = None,
) -> QuantProblem | None:  # fmt: skip
    """What chooses the kernel of a checked call; None where nothing is written.

    Args:
        width: Columns of the result.
        matrices: All matrices but x: residual, result.
        aligned: Whether all begin at whole 16 bytes.

    Raises:
        ArgumentError: fp32 rows, which only the reference takes.
    """
    dtype = gpu_dtype("x", x)
    kind = dtype if weight is None else dtype_name(weight.dtype)
    whole = aligned and width % VECTOR == 0
    whole = whole and not any(step_of(y) % VECTOR for y in (x, *matrices))
    rows = x.shape[0]
    return QuantProblem(op, group, rows, width, dtype, kind, whole) if rows and width else None


def step_of(x: Tensor | None) -> int:
    """Elements between rows; 0 for one row, or for a result that is to be made without gaps."""
    return 0 if x is None or x.shape[0] < 2 else int(x.stride(0))


def bind(
    dispatcher: OperatorDispatcher[QuantProblem, QuantConfig],
    problem: QuantProblem,
    budget: Budget,
    capturing: bool,
    read: list[Tensor],
    out: Tensor | None,
    numbers: tuple[int | float, ...],
) -> Bound:
    """The launch of a problem for matrices that lie so.

    Args:
        read: Matrices in their order whose row strides the kernel takes before the result's.
        numbers: What the kernel takes behind the row strides.
    """
    run = dispatcher.launch(problem, budget, capturing=capturing)
    unit = VECTOR if problem.aligned else 1
    out_step = problem.width if out is None else step_of(out)
    behind = (*(step // unit for step in (*map(step_of, read), out_step)), *numbers)

    def launch(*addresses: int) -> None:
        run(*addresses, *behind)

    return Bound(launch, workspace_bytes=workspace_of(problem))


def scale_steps(scale: Tensor | None, problem: QuantProblem) -> tuple[int, int]:
    """Elements from a scale to the next row's, and to the next block's."""
    if "block" not in problem.group:
        return (1, 0)
    return (problem.width // FP8_BLOCK, 1) if scale is None else block_steps(scale)


def workspace_of(problem: QuantProblem) -> int:
    """Bytes of counters: a scale of a whole matrix is found by the last CTA."""
    return COUNTER_BYTES if problem.op == "quantize" and problem.group == "tensor" else 0
