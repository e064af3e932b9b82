"""Compiling side by side the GEMMs that a runtime will launch, before it serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from smkern.bench.model.prepare import problems_of
from smkern.bench.runtime.serving import Sizes
from smkern.device import Budget, device_info
from smkern.models import ModelConfig
from smkern.runtime.model.sizes import batch_bucket
from smkern.tuning.config import GemmProblem

CLUSTERS_FROM = 0.5
"""A spread partition of at most this share of the SMs launches no clusters."""


def budgets_of(rungs: Iterable[int], total: int) -> tuple[list[Budget], list[Budget]]:
    """Of the decode sides and of the prefill sides, the whole device first in both."""
    whole = Budget(total, "mask", clusters=True)

    def side(num_sms: int) -> Budget:
        return Budget(num_sms, "mask", clusters=num_sms > CLUSTERS_FROM * total)

    rungs = tuple(rungs)
    return [whole, *map(side, rungs)], [whole, *(side(total - n) for n in rungs)]


def step_problems(config: ModelConfig, max_running: int) -> Iterator[GemmProblem]:
    """The GEMMs of decode steps of every bucket."""
    for rows in dict.fromkeys(batch_bucket(n, max_running) for n in range(1, max_running + 1)):
        yield from problems_of(config, rows, rows)


def compile_steps(config: ModelConfig, sizes: Sizes, prompts: Iterable[int]) -> int:
    """Compile what decode steps and prompts of so many tokens will launch; how many variants."""
    if not torch.cuda.is_available():
        return 0
    from smkern.bench.compiling import dispatcher_of, precompile, settled_problem

    decode, prefill = budgets_of(sizes.rungs, device_info().num_sms)
    wanted = [
        *((p, b) for p in step_problems(config, sizes.max_running) for b in decode),
        *((p, b) for n in prompts for p in problems_of(config, n, 1) for b in prefill),
    ]
    found = {
        (replace(problem, batch_invariant=sizes.batch_invariant), budget)
        for problem, budget in wanted
    }
    ready = [(settled_problem(problem, budget), budget, None) for problem, budget in found]
    return precompile(dispatcher_of(), ready)
