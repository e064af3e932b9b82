"""Compiling side by side what GEMMs will launch, before anything is timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from smkern.device import Budget
from smkern.latency.model_gemms import problems_of
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem
from smkern.tuning.constraints import LIBRARIES

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

Forwards = tuple[Iterable[tuple[int, int]], Sequence[Budget]]
"""(tokens, requests) of forwards, and the budgets that they run in."""


def dispatcher_of() -> Dispatcher:
    """The dispatcher behind `smkern.gemm` on the device that is measured."""
    from smkern.ops.gemm.dispatch import gemm_dispatcher

    return gemm_dispatcher(0)


def settled_problem(
    problem: GemmProblem, budget: Budget, dispatcher: Dispatcher | None = None
) -> GemmProblem:
    """The GEMM that dispatch will launch: the plain one where it runs SwiGLU unfused."""
    dispatcher = dispatcher or dispatcher_of()
    if dispatcher.select(problem, budget).config.kernel != "unfused":
        return problem
    return replace(problem, epilogue=Epilogue())


def precompile(wanted: Iterable[tuple[GemmProblem, Budget, str | None]]) -> int:
    """Compile in parallel what `wanted` (problem, budget, backend) will launch; how many."""
    select = dispatcher_of().select
    return compile_configs((item[0], select(*item).config) for item in wanted)


def compile_configs(
    configs: Iterable[tuple[GemmProblem, GemmConfig]],
    *,
    done: Callable[[int, int], None] | None = None,
) -> int:
    """Compile in parallel what these will launch; how many variants.

    One that does not compile is left to its cell, which will name the error.
    """
    from smkern.kernels.gemm_compile import precompile as compile_all
    from smkern.kernels.gemm_variants import variant_of

    sm = dispatcher_of().profile.info.sm
    variants = {
        variant_of(problem, config, sm)
        for problem, config in configs
        if config.kernel not in LIBRARIES
    }
    try:
        return compile_all(variants, workers=os.cpu_count() or 1, done=done)
    except Exception as error:  # noqa: BLE001  whatever a compiler raises
        click.echo(f"not all variants compile: {type(error).__name__}: {error}", err=True)
        return 0


def compile_forwards(
    config: ModelConfig,
    wanted: Iterable[Forwards],
    *,
    batch_invariant: bool = False,
    ranks: int = 1,
) -> int:
    """Compile side by side the GEMMs of forwards; how many variants.

    Args:
        config: The model, or a rank's part of it.
        wanted: The forwards, and where they run.
        batch_invariant: The decoder's mode.
        ranks: How many share the model.
    """
    found = {
        (replace(problem, batch_invariant=batch_invariant), budget): None
        for sizes, budgets in wanted
        for tokens, requests in sizes
        for rows in (tokens, requests)  # a prompt's last layer ends with the rows of logits
        for problem in problems_of(config, rows, requests, ranks)
        for budget in budgets
    }
    return precompile((settled_problem(problem, budget), budget, None) for problem, budget in found)
