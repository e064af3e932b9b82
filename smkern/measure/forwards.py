"""Compiling side by side what a model's GEMMs will launch, before anything is timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from smkern.device import Budget
from smkern.measure.compiling import precompile, settled_problem
from smkern.tuning.config import Epilogue, GemmProblem

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

Forwards = tuple[Iterable[tuple[int, int]], Sequence[Budget]]
"""(tokens, requests) of forwards, and the budgets that they run in."""


def problems_of(
    config: ModelConfig, tokens: int, batch: int, ranks: int = 1
) -> tuple[GemmProblem, ...]:
    """The GEMMs of a forward of so many tokens and requests, but for those on e4m3: these compile
    when they first run, and are few. Of a part that `ranks` GPUs share, sums are not added."""
    hidden, residual = config.hidden_size, Epilogue(residual=ranks == 1)
    whole = [GemmProblem(batch, config.vocab_size // ranks, hidden)]
    if config.moe is not None:
        whole.append(GemmProblem(tokens, config.moe.num_experts, hidden))
    if config.quantization is not None:
        return tuple(whole)
    found = [
        GemmProblem(tokens, config.qkv_size, hidden),
        GemmProblem(tokens, hidden, config.q_size, epilogue=residual),
        *whole,
    ]
    if config.moe is not None:
        return tuple(found)
    inner = config.intermediate_size
    found.append(GemmProblem(tokens, 2 * inner, hidden, epilogue=Epilogue(swiglu=True)))
    found.append(GemmProblem(tokens, hidden, inner, epilogue=residual))
    return tuple(found)


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
