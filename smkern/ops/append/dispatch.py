"""From an append problem to its launch on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from smkern.ops.bounded_cache import model_rows
from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.tuning.append import APPEND_FAMILY, AppendConfig, AppendProblem


@cache
def append_dispatcher(index: int) -> OperatorDispatcher[AppendProblem, AppendConfig]:
    """The dispatcher of a device that is present: its profile, its table, its kernels."""
    from smkern.kernels.append_launch import AppendKernels

    return load_dispatcher(index, AppendKernels, APPEND_FAMILY.selector, of_step)


def of_step(problem: AppendProblem) -> AppendProblem:
    """The problem with the tokens that the choice of a whole step is made for."""
    return replace(problem, tokens=model_rows(problem.tokens))
