"""What is worth measuring in a cell: the model's best, of different kinds, and the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from smkern.device import Budget
from smkern.profile import Profile
from smkern.tuning import space
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem, Kernel
from smkern.tuning.cost_constants import CostConstants
from smkern.tuning.select import rank

MAX_OF_A_KIND = 3
"""Configurations of the same kernel, tile and orientation in a shortlist."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and the model's time for it, us."""

    config: GemmConfig
    predicted_us: float

    @property
    def name(self) -> str:
        """`ws:64x128x64:w4:s4:k1:c2`: short, and unique within a cell."""
        c = self.config
        if c.kernel in space.LIBRARIES:
            return c.kernel
        parts = [c.kernel, f"{c.block_m}x{c.block_n}x{c.block_k}", f"w{c.num_warps}"]
        parts += [f"s{c.num_stages}", f"k{c.split or 'stream'}", f"g{c.group_m}"]
        parts += ["swap"] * c.swap + ["eager"] * c.eager
        parts += [f"c{c.ctas_per_sm}"] * (c.ctas_per_sm > 1)
        parts += [f"max{c.max_ctas}"] * (c.max_ctas > 0)
        parts += ["apart"] * (not c.overlap)
        return ":".join(parts)


def shortlist(
    problem: GemmProblem,
    budget: Budget,
    profile: Profile,
    constants: CostConstants,
    *,
    top: int = 8,
    kernels: tuple[Kernel, ...] = space.AVAILABLE,
    cublaslt: bool = True,
) -> list[Candidate]:
    """The `top` candidates by predicted time, at most three of a kind; cuBLASLt where it may run.

    SwiGLU comes unfused, too.

    Where the model is wrong it is wrong for all configurations of a kind, so others get a chance.
    A swapped ws candidate comes with its `eager` twin: which of the two wins turns with how many
    CTAs share an SM, and the model does not know.
    """
    found: list[Candidate] = []
    kinds: Counter[tuple[object, ...]] = Counter()
    capability = profile.info.capability
    for ranked in rank(problem, budget, profile, kernels=kernels, constants=constants):
        if len(found) == top:
            break
        variant = ranked.variant
        kind = (variant.kernel, variant.block_m, variant.block_n, variant.swap)
        if kinds[kind] < MAX_OF_A_KIND:
            kinds[kind] += 1
            found.append(Candidate(ranked.config(), ranked.predicted_us))
    found = sorted([*found, *_twins(found)], key=lambda candidate: candidate.predicted_us)
    # a hint is all that the library makes of an SM count: only where it cannot leave the budget
    enforced = budget.confined == "mask" or budget.num_sms == profile.info.num_sms
    if cublaslt and enforced and space.is_legal(problem, space.CUBLASLT, budget, capability):
        found.append(Candidate(space.CUBLASLT, found[0].predicted_us))
    if space.is_legal(problem, space.UNFUSED, budget, capability):
        found.append(Candidate(space.UNFUSED, found[0].predicted_us))
    return found


def _twins(found: Sequence[Candidate]) -> list[Candidate]:
    """Swapped ws candidates with `eager` turned over, where that is not there already."""
    there = {candidate.config for candidate in found}
    twins = [
        Candidate(replace(c.config, eager=not c.config.eager), c.predicted_us)
        for c in found
        if c.config.kernel == "ws" and c.config.swap
    ]
    return [twin for twin in twins if twin.config not in there]


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


def parse_epilogue(text: str) -> Epilogue:
    """`bias+residual+silu` or `swiglu` -> Epilogue, `none` the empty one: inverse of `.key`.

    Raises:
        ValueError: a part is none of bias, residual, silu, gelu.
    """
    if text == "swiglu":
        return Epilogue(swiglu=True)
    parts = [] if text == "none" else text.split("+")
    activation = None
    for part in parts:
        if part in ("silu", "gelu"):
            activation = part
        elif part not in ("bias", "residual"):
            raise ValueError(f"{part!r} is no epilogue; use bias, residual, silu, gelu or none")
    return Epilogue("bias" in parts, "residual" in parts, activation)  # type: ignore[arg-type]
