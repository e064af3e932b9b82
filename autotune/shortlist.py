"""The candidates of a GEMM's cell: the model's best of different kinds, and the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from smkern.device import Budget
from smkern.profile import Profile
from smkern.tuning import constraints
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem
from smkern.tuning.cost_constants import CostConstants
from smkern.tuning.select import rank
from smkern.tuning.table import Served

MAX_OF_A_KIND = 3
"""Configurations of the same kernel, tile and orientation in a shortlist."""
OF_EXTRAS = 4
"""Candidates of a kernel that needs an extra."""
BOTH_WAYS = 2
"""Candidates that are measured both overlapping the launch before and apart from it."""


def shortlist(
    problem: GemmProblem,
    budget: Budget,
    profile: Profile,
    constants: CostConstants,
    *,
    top: int = 8,
    served: Served = lambda problem, config: False,
) -> dict[GemmConfig, float]:
    """The `top` configurations and their predicted times, us, at most three of a kind.

    Of each kernel that needs an extra come the `OF_EXTRAS` best that are `served`, besides.
    cuBLASLt comes where it may run, and SwiGLU unfused, too. Where the model is wrong it is wrong
    for all configurations of a kind, so others get a chance. A swapped ws candidate comes with its
    `eager` twin: which of the two wins turns with how many CTAs share an SM, and the model does not
    know. The first come with launches that overlap and that do not: between them lie up to 1.4.
    """
    found: dict[GemmConfig, float] = {}
    kinds: Counter[tuple[object, ...]] = Counter()
    capability = profile.info.capability
    for ranked in rank(
        problem, budget, profile, kernels=constraints.AVAILABLE, constants=constants
    ):
        if len(found) == top:
            break
        variant = ranked.variant
        kind = (variant.kernel, variant.block_m, variant.block_n, variant.swap)
        if kinds[kind] < MAX_OF_A_KIND:
            kinds[kind] += 1
            found[ranked.config()] = ranked.predicted_us
    twins = {
        replace(config, eager=not config.eager): us
        for config, us in found.items()
        if config.kernel == "ws" and config.swap
    }
    if budget.confined == "mask":
        first = [config for config in found if config.kernel == "ws"][:BOTH_WAYS]
        twins |= {replace(config, overlap=not config.overlap): found[config] for config in first}
    twins |= _of_extras(problem, budget, profile, constants, served)
    others = {config: us for config, us in twins.items() if config not in found}
    found = dict(sorted({**found, **others}.items(), key=lambda item: item[1]))
    fastest = min(found.values())
    # a hint is all that the library makes of an SM count: only where it cannot leave the budget
    enforced = budget.confined == "mask" or budget.num_sms == profile.info.num_sms
    if enforced and constraints.is_legal(problem, constraints.CUBLASLT, budget, capability):
        found[constraints.CUBLASLT] = fastest
    if constraints.is_legal(problem, constraints.UNFUSED, budget, capability):
        found[constraints.UNFUSED] = fastest
    return found


def _of_extras(
    problem: GemmProblem,
    budget: Budget,
    profile: Profile,
    constants: CostConstants,
    served: Served,
) -> dict[GemmConfig, float]:
    found: dict[GemmConfig, float] = {}
    if not constraints.may_serve_extras(problem, profile.info.capability):
        return found
    for kernel in constraints.OPTIONAL:
        tiles: set[tuple[object, ...]] = set()
        for ranked in rank(problem, budget, profile, kernels=(kernel,), constants=constants):
            tile = (ranked.variant, ranked.overlap)
            if len(tiles) < OF_EXTRAS and tile not in tiles and served(problem, ranked.variant):
                tiles.add(tile)
                found[ranked.config()] = ranked.predicted_us
    return found


def problems(
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    dtype: str = "bf16",
    epilogues: Sequence[Epilogue] = (Epilogue(),),
) -> list[GemmProblem]:
    """All problems, a weight shape after the other, so that its operands are made once."""
    return [
        GemmProblem(m, n, k, dtype, epilogue)  # type: ignore[arg-type]
        for n, k in shapes
        for epilogue in epilogues
        for m in ms
    ]
