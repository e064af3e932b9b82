"""Compiling side by side what a model's GEMMs will launch, before anything is timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smkern.device import Budget
from smkern.latency.model_gemms import problems_of
from smkern.measure.compiling import precompile, settled_problem

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

Forwards = tuple[Iterable[tuple[int, int]], Sequence[Budget]]
"""(tokens, requests) of forwards, and the budgets that they run in."""


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
