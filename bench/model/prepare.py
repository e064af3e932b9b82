"""Compiling side by side what a model's GEMMs will launch, before anything is timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from smkern.bench.model.cases import ModelPlan
from smkern.device import Budget
from smkern.measure.compiling import dispatcher_of, precompile, settled_problem
from smkern.measure.forwards import problems_of
from smkern.tuning.config import Epilogue, GemmProblem

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

PLAIN = Epilogue()


def wanted(
    config: ModelConfig, plan: ModelPlan, steps: Iterable[Budget], prompts: Iterable[Budget]
) -> Iterator[tuple[GemmProblem, Budget]]:
    """Every GEMM of decode steps in some budgets, and of the prompt in others.

    The prompt's are there without their epilogues too: they are timed by themselves.
    """
    decode = [problem for batch in plan.batches for problem in problems_of(config, batch, batch)]
    prompt = problems_of(config, plan.tokens, 1)
    plain = [replace(problem, epilogue=PLAIN) for problem in prompt]
    for budgets, problems in ((steps, decode), (prompts, [*prompt, *plain])):
        for budget in budgets:
            for problem in dict.fromkeys(problems):
                yield problem, budget


def compile_gemms(
    config: ModelConfig, plan: ModelPlan, steps: Iterable[Budget], prompts: Iterable[Budget]
) -> int:
    """Compile what dispatch will choose for these; how many variants."""
    ready = [
        (settled_problem(problem, budget), budget, None)
        for problem, budget in wanted(config, plan, steps, prompts)
    ]
    return precompile(dispatcher_of(), ready)
