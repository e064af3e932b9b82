"""From a problem over rows to its launch on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from smkern.ops.bounded_cache import model_rows
from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.tuning.rows import RowsConfig, RowsProblem, choose


@cache
def rows_dispatcher(index: int) -> OperatorDispatcher[RowsProblem, RowsConfig]:
    """The dispatcher of a device that is present: its profile, its kernels."""
    from smkern.kernels.rows_launch import RowsKernels

    return load_dispatcher(
        index, RowsKernels, lambda profile: partial(choose, profile=profile), of_step
    )


def of_step(problem: RowsProblem) -> RowsProblem:
    """The problem with the rows that the choice of a whole step is made for."""
    return replace(problem, rows=model_rows(problem.rows))
